"""Copies of a module for several devices, whose gradients flow to the module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.parallel.scatter_gather import Device, to_device


def replicate(module: nn.Module, devices: Sequence[Device], detach: bool = False) -> list[nn.Module]:
    """Returns a replica of `module` for each device; a device may be named several times.

    In place of parameters the replicas have copies, through which backward reaches the parameters of the module, where
    the gradients of all replicas add up. The first replica has the module's own buffers, so that what forward writes
    to them (as BatchNorm does) stays; the others have copies.

    Args:
        module: has all parameters and buffers on the first device.
        devices: one for each replica.
        detach: detach the replicas' parameters from the module's.
    """
    chosen = [to_device(device) for device in devices]
    modules = list(module.modules())
    number = {id(each): at for at, each in enumerate(modules)}
    replicas: list[nn.Module] = []
    for at, device in enumerate(chosen):
        copies = {id(p): _copy_of(p.detach() if detach else p, device) for p in module.parameters()}
        copies |= {id(b): b if at == 0 else b.to(device, copy=True) for b in module.buffers()}
        mirrored: list[nn.Module] = [each._replicate_for_data_parallel() for each in modules]
        for original, replica in zip(modules, mirrored, strict=True):
            children = (None if child is None else mirrored[number[id(child)]] for child in original._modules.values())
            _fill(original, replica, copies, list(children))
        replicas.append(mirrored[0])
    return replicas


def _fill(
    original: nn.Module, replica: nn.Module, copies: dict[int, torch.Tensor], children: Sequence[nn.Module | None]
) -> None:
    former: dict[str, torch.Tensor | None] = {}
    for name, child in zip(original._modules, children, strict=True):
        replica._modules[name] = child
    for name, param in original._parameters.items():
        if param is None:
            replica._parameters[name] = None
        else:
            # A plain attribute, since only a leaf can be a parameter.
            setattr(replica, name, copies[id(param)])
            former[name] = copies[id(param)]
    for name, buffer in original._buffers.items():
        replica._buffers[name] = None if buffer is None else copies[id(buffer)]
    replica.__dict__["_former_parameters"] = former  # torch's RNNs read this attribute


def _copy_of(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    return param.view_as(param) if param.device == device else param.to(device, non_blocking=True)
