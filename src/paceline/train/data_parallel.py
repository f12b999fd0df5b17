"""DataParallel: single-process training on several devices, with one module replica and one thread per device.

`scatter` splits arguments and `gather` concatenates outputs. `replicate` creates differentiable copies of the module,
through which gradients flow back to the original. `parallel_apply` runs the replicas in threads.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.nn.utils.rnn import PackedSequence

from paceline.comm.engine.adapters.device_streams import (
    activated,
    current_accelerator,
    current_stream,
    on_stream,
    with_index,
)
from paceline.train.preconditions import absent_device_text, wrong_device_text

Device = torch.device | str | int


def to_device(device: Device) -> torch.device:
    """Converts a device argument to torch.device; an integer is the index of a GPU or other accelerator."""
    chosen = torch.device(_accelerator_type(), device) if isinstance(device, int) else torch.device(device)
    if chosen.type != "cpu" and chosen.index is None and torch.accelerator.is_available():
        return with_index(chosen)
    return torch.device("cuda", 0) if chosen.type == "cuda" and chosen.index is None else chosen


def _accelerator_type() -> str:
    accelerator = current_accelerator()
    return "cuda" if accelerator is None else accelerator.type


def scatter(value: object, devices: Sequence[Device], dim: int = 0) -> list[object]:
    """Splits every tensor in `value` along `dim` into one part for each device.

    Tensors may be nested in lists, tuples, named tuples, mappings and dataclasses. All other values are passed to every
    device. If there is a single device, a PackedSequence is moved to that device.

    Args:
        value: an arbitrary object.
        devices: the devices; a device may be listed several times.
        dim: the batch dimension. Tensors without this dimension are copied whole to every device.

    Returns:
        A list with one value for each device. The list is shorter, but never empty, if there are fewer samples than
        devices.

    Raises:
        TypeError: `value` contains a PackedSequence, and there are several devices.

    >>> [part.tolist() for part in scatter(torch.arange(5), ["cpu", "cpu"])]
    [[0, 1, 2], [3, 4]]
    """
    sizes = {tensor.shape[dim] for tensor in _tensors(value) if tensor.dim() > dim}
    count = min([len(devices), *(_chunks(size, len(devices)) for size in sizes)])

    def part(index: int) -> object:
        device = to_device(devices[index])
        return map_tensors(value, lambda leaf: _part(leaf, index, count, dim, device), (torch.Tensor, PackedSequence))

    return [part(index) for index in range(count)]


def scatter_arguments(
    args: Sequence[object], kwargs: Mapping[str, object], devices: Sequence[Device], dim: int = 0
) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """Splits positional and keyword arguments into a pair for each device; see `scatter`."""
    parts = scatter((tuple(args), dict(kwargs)), devices, dim)
    return cast("list[tuple[tuple[object, ...], dict[str, object]]]", parts)


def gather(outputs: Sequence[object], output_device: Device, dim: int = 0) -> object:
    """Concatenates the outputs of replicas, which may be nested, along `dim`.

    Scalar tensors are stacked into a vector. Values other than tensors must be equal in all outputs.

    Raises:
        TypeError: values other than tensors differ, or the outputs have different types.
    """
    return concatenate(outputs, to_device(output_device), dim)


def concatenate(outputs: Sequence[object], device: torch.device | None, dim: int) -> object:
    """Implements `gather`; if `device` is None, each result is on the device of the first tensor that it contains."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        if len(tensors) == len(outputs):
            moved = [tensor.to(device or first.device) for tensor in tensors]
            return torch.stack(moved) if first.dim() == 0 else torch.cat(moved, dim)
    if any(type(output) is not type(first) for output in outputs):
        kinds = sorted({type(output).__name__ for output in outputs})
        raise TypeError(
            f"the replicas returned outputs of the types {' and '.join(kinds)}; forward must return the same type on "
            "every device, whatever the batch"
        )
    inner = [_children(output) for output in outputs]
    if inner[0] is None:
        if any(output != first for output in outputs):
            raise TypeError(
                f"the replicas returned different values of type {type(first).__name__}: "
                f"{', '.join(map(repr, outputs))}; only tensors can be concatenated, so forward must return a "
                "tensor here"
            )
        return first
    nests = [children for children in inner if children is not None]
    if len({tuple(children) for children in nests}) != 1:
        raise TypeError(
            f"the replicas returned values of type {type(first).__name__} with different entries: "
            f"{' and '.join(str(list(children)) for children in nests)}; forward must return the same entries on "
            "every device, whatever the batch"
        )
    gathered = {key: concatenate([children[key] for children in nests], device, dim) for key in nests[0]}
    return _with_children(first, gathered)


_Leaf = torch.Tensor | PackedSequence


def map_tensors(value: object, change: Callable[[Any], object], leaves: tuple[type, ...] = (torch.Tensor,)) -> object:
    """Copies a nested structure of lists, tuples, mappings and dataclasses, applying `change` to its `leaves`."""
    if isinstance(value, leaves):
        return change(value)
    children = _children(value)
    if children is None:
        return value
    return _with_children(value, {key: map_tensors(child, change, leaves) for key, child in children.items()})


def _chunks(size: int, count: int) -> int:
    """Returns the number of chunks into which `torch.chunk(count)` splits a dimension of length `size`."""
    return -(-size // -(-size // count)) if size else 1


def _part(tensor: _Leaf, index: int, count: int, dim: int, device: torch.device) -> _Leaf:
    if isinstance(tensor, PackedSequence):
        if count > 1:
            raise TypeError(
                f"a PackedSequence cannot be divided between {count} devices, because its rows are ordered by time; "
                "pass one device in device_ids, or pass padded sequences and pack them in forward"
            )
        # PackedSequence.to keeps `batch_sizes` on the CPU, as nn.LSTM requires.
        return cast("PackedSequence", cast(Any, tensor).to(device))
    if tensor.dim() <= dim:
        return tensor.to(device)
    parts = tensor.chunk(count, dim)
    if len(parts) != count:
        # Another argument with fewer samples has determined the number of parts.
        parts = tensor.tensor_split(count, dim)
    return _moved(parts[index], device)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A copy to the CPU must be blocking: the host could read a non-blocking copy before it is complete.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return []
    children = _children(value)
    return [] if children is None else [tensor for child in children.values() for tensor in _tensors(child)]


def _children(value: object) -> dict[object, object] | None:
    """Returns the entries of a list, tuple, mapping or dataclass by key; None for other values."""
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _with_children(value: object, children: dict[object, object]) -> object:
    """Returns a copy of a list, tuple, mapping or dataclass whose entries are replaced with `children`."""
    make: Callable[..., object] = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return make(*children.values())
    if isinstance(value, (list, tuple)):
        return make(children.values())
    if isinstance(value, Mapping):
        return make(children.items())
    copied = object.__new__(type(value))  # a dataclass's __init__ may take other arguments
    copied.__dict__.update(value.__dict__)
    for name, child in children.items():
        object.__setattr__(copied, str(name), child)  # the dataclass may be frozen
    return copied


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[object],
    kwargs_tup: Sequence[Mapping[str, object]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[object]:
    """Calls each module with its inputs in a separate thread, and returns the outputs.

    The threads inherit the caller's grad mode, inference mode, autocast state, and current stream on each device.

    Args:
        modules: the modules, one for each device.
        inputs: for each module, a tuple of arguments or a single argument.
        kwargs_tup: for each module, the keyword arguments.
        devices: the modules' devices. An accelerator becomes the current device of the module's thread, and error
            messages contain the device.

    Raises:
        ValueError: the arguments have different lengths.
        Exception: an error from a module; the message contains the index and the device of the replica, and the
            traceback.
    """
    keywords = [{}] * len(modules) if kwargs_tup is None else list(kwargs_tup)
    chosen: Sequence[Device] = ["cpu"] * len(modules) if devices is None else list(devices)
    if not len(modules) == len(inputs) == len(keywords) == len(chosen):
        raise ValueError(
            f"parallel_apply got {len(modules)} modules, {len(inputs)} inputs, {len(keywords)} kwargs_tup and "
            f"{len(chosen)} devices; it needs the same number of each"
        )
    results: list[object] = [None] * len(modules)
    in_mode = _captured_modes(list(map(to_device, chosen)))

    def run(index: int) -> None:
        device = to_device(chosen[index])
        given = inputs[index]
        arguments = given if isinstance(given, (list, tuple)) else (given,)
        try:
            with in_mode(device):
                results[index] = modules[index](*arguments, **keywords[index])
        except Exception:
            results[index] = ExceptionWrapper(where=f"in replica {index} on device {device}")

    if len(modules) == 1:
        run(0)
    else:
        threads = [threading.Thread(target=run, args=(i,), name=f"replica {i}") for i in range(len(modules))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        if isinstance(result, ExceptionWrapper):
            result.reraise()
    return results


def _captured_modes(devices: Sequence[torch.device]) -> Callable[[torch.device], AbstractContextManager[None]]:
    """Captures the current thread's grad mode, inference mode, autocast state, and streams on `devices`.

    The returned function creates a context that applies them in another thread, with its argument as current device.
    """
    streams = {device: current_stream(device) for device in devices if device.type not in ("cpu", "meta")}
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = {"cpu", *(device.type for device in streams)}
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    autocast_cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def in_mode(device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            # The caller copies parameters and inputs, and uses the outputs, on its own stream.
            if device in streams:
                stack.enter_context(activated(device))
                stack.enter_context(on_stream(device, streams[device]))
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=autocast_cache))
            yield

    return in_mode


def replicate(module: nn.Module, devices: Sequence[Device], detach: bool = False) -> list[nn.Module]:
    """Returns a replica of `module` for each device.

    Replicas contain differentiable copies of the parameters. Backward propagates through the copies to the module's
    parameters, which accumulate the gradients of all replicas. The first replica uses the module's own buffers, so
    buffer updates in forward (for example in BatchNorm) persist; all other replicas use copies.

    Args:
        module: the module, with all parameters and buffers on the first device.
        devices: the device of each replica; devices may repeat.
        detach: whether the replicas' parameters are detached from the module's.
    """
    modules = list(module.modules())
    number = {id(layer): index for index, layer in enumerate(modules)}
    replicas: list[nn.Module] = []
    for index, device in enumerate(map(to_device, devices)):
        copies = {id(p): _copy_of(p.detach() if detach else p, device) for p in module.parameters()}
        copies |= {id(b): b if index == 0 else b.to(device, copy=True) for b in module.buffers()}
        mirrored: list[nn.Module] = [layer._replicate_for_data_parallel() for layer in modules]
        for original, replica in zip(modules, mirrored, strict=True):
            for name, child in original._modules.items():
                replica._modules[name] = None if child is None else mirrored[number[id(child)]]
            _set_tensors(original, replica, copies)
        replicas.append(mirrored[0])
    return replicas


def _set_tensors(original: nn.Module, replica: nn.Module, copies: dict[int, torch.Tensor]) -> None:
    former = {name: copies[id(param)] for name, param in original._parameters.items() if param is not None}
    for name in original._parameters:
        if name in former:
            # The copy is a plain attribute, because it is not a leaf tensor and therefore cannot be a parameter.
            setattr(replica, name, former[name])
        else:
            replica._parameters[name] = None
    for name, buffer in original._buffers.items():
        replica._buffers[name] = None if buffer is None else copies[id(buffer)]
    replica.__dict__["_former_parameters"] = former  # torch's RNNs read this attribute


def _copy_of(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    return param.view_as(param) if param.device == device else _moved(param, device)


class DataParallel(nn.Module):
    """Splits the batch between devices, runs a replica of `module` on each device, and concatenates the outputs.

    Each forward pass creates the replicas, whose gradients accumulate in the module. `DistributedDataParallel`, with
    one process per device, is faster, because the replicas of this class run on threads in one Python interpreter and
    the module is copied in every step.

    Args:
        module: a module whose parameters are on the first device.
        device_ids: the devices; an integer is a GPU index, and a device may be listed several times, as in
            `["cpu", "cpu"]`. If None, all GPUs (or other accelerators) are used. As in torch, the module is called
            directly on a machine without accelerators, except with the CPU in `device_ids`.
        output_device: the device of the concatenated outputs; if None, the first device.
        dim: the batch dimension.

    Raises:
        RuntimeError: a parameter or buffer is not on the first device.
        ValueError: a GPU in `device_ids` or `output_device` does not exist, and the machine has other GPUs.

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
        ids: Sequence[Device] = range(torch.accelerator.device_count()) if device_ids is None else device_ids
        self.device_ids = [to_device(device) for device in ids]
        self.output_device = self.device_ids[0] if self.device_ids else torch.device("cpu")
        if output_device is not None:
            self.output_device = to_device(output_device)
        if not torch.accelerator.device_count() and all(device.type != "cpu" for device in self.device_ids):
            self.device_ids, self.output_device = [], torch.device("cpu")  # torch ignores the indices here too
        absent = absent_device_text(self.device_ids, self.output_device)
        if absent is not None:
            raise ValueError(absent)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Calls the replicas with parts of the batch; non-tensor arguments are passed to every replica."""
        if not self.device_ids:
            return self.module(*args, **kwargs)
        _require_on(self.module, self.device_ids[0])
        return apply_on_devices(self.module, self.device_ids, self.output_device, self.dim, args, kwargs)


def data_parallel(
    module: nn.Module,
    inputs: object,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, object] | None = None,
) -> object:
    """Calls a module once on several devices; the functional form of `DataParallel`.

    Args:
        module, device_ids, output_device, dim: see `DataParallel`.
        inputs: the arguments for the module, as a tuple or a single argument.
        module_kwargs: the keyword arguments for the module.
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
    """Calls replicas with parts of the batch; a batch with one part is passed to `call` (by default the module)."""
    parts = scatter_arguments(args, kwargs, devices, dim)
    used = devices[: len(parts)]
    if len(used) == 1:
        return (call or module)(*parts[0][0], **parts[0][1])
    replicas = replicate(module, used, detach=not torch.is_grad_enabled())
    outputs = parallel_apply(replicas, [part[0] for part in parts], [part[1] for part in parts], used)
    return gather(outputs, output_device, dim)


def _require_on(module: nn.Module, device: torch.device) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != device:
            raise RuntimeError(wrong_device_text(name, tensor, device))
