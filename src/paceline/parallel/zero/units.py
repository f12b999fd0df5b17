"""Which parameters of a module are gathered together (ZeRO stage 3)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that holds these parameters while its forward runs, and its backward."""

    name: str
    module: nn.Module
    params: tuple[torch.Tensor, ...]


def find_units(module: nn.Module, params: Collection[torch.Tensor]) -> list[Unit]:
    """The elements of every `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`, and last the module itself.

    Those are the layers of a model, which are called one after the other. A unit within another one has its parameters
    for itself. All other parameters, and those that several units share, belong to the module as a whole: they are
    there while anything runs that may look at them.

    Args:
        params: those to be divided among units; others are left out.
    """
    wanted = {id(param) for param in params}
    layers: dict[int, tuple[str, nn.Module]] = {}
    for name, container in module.named_modules():
        if isinstance(container, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            for child, layer in container.named_children():
                if not isinstance(layer, (nn.ModuleList, nn.ModuleDict)):  # those have no forward
                    layers.setdefault(id(layer), (f"{name}.{child}".lstrip("."), layer))
    layers.pop(id(module), None)

    homes: dict[int, set[int]] = {}
    found: dict[int, torch.Tensor] = {}

    def visit(current: nn.Module, home: int) -> None:
        home = id(current) if id(current) in layers else home
        for param in current.parameters(recurse=False):
            if id(param) in wanted:
                homes.setdefault(id(param), set()).add(home)
                found[id(param)] = param
        for part in current.children():
            visit(part, home)

    visit(module, id(module))
    members: dict[int, list[torch.Tensor]] = {home: [] for home in layers}
    members[id(module)] = []
    for key, param in found.items():
        among = homes[key]
        members[min(among) if len(among) == 1 else id(module)].append(param)
    layers[id(module)] = ("", module)
    return [Unit(*layers[home], tuple(members[home])) for home in members if members[home]]
