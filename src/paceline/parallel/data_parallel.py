"""Data parallel training in one process: the batch is split between devices, and the module copied to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from paceline.parallel.parallel_apply import parallel_apply
from paceline.parallel.placement import absent_device_text, wrong_device_text
from paceline.parallel.replicate import replicate
from paceline.parallel.scatter_gather import Device, gather, scatter_arguments, to_device


class DataParallel(nn.Module):
    """Splits the batch between devices, runs a replica of `module` on each in a thread, and concatenates the outputs.

    The replicas live for one forward, and the gradients of all replicas are added in the module. The threads share one
    interpreter, and the module is copied in every step: `DistributedDataParallel`, with a process for each device, is
    faster.

    Args:
        module: a module whose parameters are on the first device.
        device_ids: a number means a GPU; a device may be named several times, as in `["cpu", "cpu"]`. None means all
            GPUs; if there are none, the module is called directly.
        output_device: where results are concatenated; the first device if None.
        dim: the batch dimension.

    Raises:
        RuntimeError: a parameter or buffer is not on the first device.
        ValueError: `device_ids` or `output_device` names a GPU that does not exist.

    Example::

        model = paceline.DataParallel(model, ["cuda:0", "cuda:1"])
        loss_function(model(inputs), targets).backward()  # the gradients are in the module
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.module = module
        self.dim = dim
        ids: Sequence[Device] = range(torch.cuda.device_count()) if device_ids is None else device_ids
        self.device_ids = [to_device(device) for device in ids]
        self.output_device = self.device_ids[0] if self.device_ids else torch.device("cpu")
        if output_device is not None:
            self.output_device = to_device(output_device)
        absent = absent_device_text(self.device_ids, self.output_device)
        if absent is not None:
            raise ValueError(absent)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Calls the replicas on parts of the batch; arguments other than tensors go to every replica as they are."""
        if not self.device_ids:
            return self.module(*args, **kwargs)
        require_on(self.module, self.device_ids[0])
        return apply_on_devices(self.module, self.device_ids, self.output_device, self.dim, args, kwargs)


def data_parallel(
    module: nn.Module,
    inputs: object,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, object] | None = None,
) -> object:
    """Calls a module once as `DataParallel` does.

    Args:
        module, device_ids, output_device, dim: the arguments of `DataParallel`.
        inputs: a tuple of arguments, or a single argument.
        module_kwargs: keyword arguments.
    """
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*arguments, **(module_kwargs or {}))


def apply_on_devices(
    module: nn.Module,
    devices: Sequence[torch.device],
    output_device: torch.device,
    dim: int,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    call: Callable[..., object] | None = None,
) -> object:
    """Calls replicas of the module on parts of the batch; where there is one part, calls `call`, or the module."""
    parts = scatter_arguments(args, kwargs, devices, dim)
    used = devices[: len(parts)]
    if len(used) == 1:
        return (call or module)(*parts[0][0], **parts[0][1])
    replicas = replicate(module, used, detach=not torch.is_grad_enabled())
    outputs = parallel_apply(replicas, [part[0] for part in parts], [part[1] for part in parts], used)
    return gather(outputs, output_device, dim)


def require_on(module: nn.Module, device: torch.device) -> None:
    """Raises unless the module is on `device`.

    Raises:
        RuntimeError: a parameter or buffer is not on `device`; the message names it.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != device:
            raise RuntimeError(wrong_device_text(name, tensor, device))
