"""DataParallel: training on several devices in one process, with a replica of the module and a thread for each device.

`scatter` and `gather` divide and concatenate the arguments and outputs, `replicate` copies the module so that gradients
flow back to it, and `parallel_apply` runs the replicas in threads.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.nn.utils.rnn import PackedSequence

from paceline.comm.engine.adapters.device_streams import activated, current_stream, on_stream, with_index
from paceline.train.preconditions import absent_device_text, wrong_device_text

Device = torch.device | str | int


def to_device(device: Device) -> torch.device:
    """Returns the device; an integer is the index of a GPU, or of another accelerator on a machine that has one."""
    chosen = torch.device(_accelerator_type(), device) if isinstance(device, int) else torch.device(device)
    if chosen.type != "cpu" and chosen.index is None and torch.accelerator.is_available():
        return with_index(chosen)
    return torch.device("cuda", 0) if chosen.type == "cuda" and chosen.index is None else chosen


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cuda" if accelerator is None else accelerator.type


def scatter(value: object, devices: Sequence[Device], dim: int = 0) -> list[object]:
    """Splits every tensor in `value` along `dim` into one part for each device.

    Tensors may be nested in lists, tuples, named tuples, mappings and dataclasses. All other values are passed to every
    device. A PackedSequence is moved to a single device as `PackedSequence.to` does.

    Args:
        value: any object.
        devices: the devices, which may repeat.
        dim: the batch dimension; tensors with fewer dimensions are copied whole to every device.

    Returns:
        A list with one value for each device. It is shorter, but never empty, if the batch has fewer samples than there
        are devices.

    Raises:
        TypeError: `value` contains a PackedSequence, and there are several devices.

    >>> [part.tolist() for part in scatter(torch.arange(5), ["cpu", "cpu"])]
    [[0, 1, 2], [3, 4]]
    """
    sizes = {tensor.shape[dim] for tensor in _tensors(value) if tensor.dim() > dim}
    count = min([len(devices), *(_chunks(size, len(devices)) for size in sizes)])

    def part(index: int) -> object:
        return _map_leaves(value, lambda leaf: _part(leaf, index, count, dim, to_device(devices[index])))

    return [part(index) for index in range(count)]


def scatter_arguments(
    args: Sequence[object], kwargs: Mapping[str, object], devices: Sequence[Device], dim: int = 0
) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """Returns positional and keyword arguments for each device; see `scatter`."""
    parts = scatter((tuple(args), dict(kwargs)), devices, dim)
    return cast("list[tuple[tuple[object, ...], dict[str, object]]]", parts)


def gather(outputs: Sequence[object], output_device: Device, dim: int = 0) -> object:
    """Concatenates the tensors that replicas returned, nested in any way, along `dim`.

    Tensors without dimensions become a vector. Values other than tensors must be equal in all outputs.

    Raises:
        TypeError: values other than tensors differ, or the outputs have different types.
    """
    return concatenate(outputs, to_device(output_device), dim)


def concatenate(outputs: Sequence[object], device: torch.device | None, dim: int) -> object:
    """Concatenates as `gather` does; if `device` is None, a result is on the device of the first of its tensors."""
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


def _map_leaves(value: object, change: Callable[[_Leaf], object]) -> object:
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return change(value)
    children = _children(value)
    if children is None:
        return value
    return _with_children(value, {key: _map_leaves(child, change) for key, child in children.items()})


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Returns a copy of a nest of lists, tuples, mappings and dataclasses, with `change` applied to its tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    children = _children(value)
    if children is None:
        return value
    return _with_children(value, {key: map_tensors(child, change) for key, child in children.items()})


def _chunks(size: int, count: int) -> int:
    """Returns the number of chunks that torch.chunk makes of a dimension of length `size` for a request of `count`."""
    return -(-size // -(-size // count)) if size else 1


def _part(tensor: _Leaf, index: int, count: int, dim: int, device: torch.device) -> _Leaf:
    if isinstance(tensor, PackedSequence):
        if count > 1:
            raise TypeError(
                f"a PackedSequence cannot be divided between {count} devices, since its rows are ordered by time; name "
                "one device in device_ids, or pass padded sequences and pack them in forward"
            )
        # Its `batch_sizes` stay on the CPU, as nn.LSTM requires.
        return cast("PackedSequence", cast(Any, tensor).to(device))
    if tensor.dim() <= dim:
        return tensor.to(device)
    parts = tensor.chunk(count, dim)
    if len(parts) != count:
        # Another tensor of the call, with a smaller batch, has determined the number of parts.
        parts = tensor.tensor_split(count, dim)
    return _moved(parts[index], device)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # The host could read a copy to the CPU before it is complete.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return []
    children = _children(value)
    return [] if children is None else [tensor for child in children.values() for tensor in _tensors(child)]


def _children(value: object) -> dict[object, object] | None:
    """Returns the children of a nest by key; None if `value` is not a nest."""
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _with_children(value: object, children: dict[object, object]) -> object:
    """Returns a copy of the nest `value` with `children` in place of its own."""
    make: Callable[..., object] = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return make(*children.values())
    if isinstance(value, (list, tuple)):
        return make(children.values())
    if isinstance(value, Mapping):
        return make(children.items())
    copied = object.__new__(type(value))  # works regardless of the arguments of its __init__
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
    """Calls each module with its inputs in a separate thread, and returns their outputs.

    The threads inherit the caller's grad mode, inference mode, autocast, and current stream on each device.

    Args:
        modules: the modules, one for each device.
        inputs: the inputs of each module: a tuple of arguments, or a single argument.
        kwargs_tup: the keyword arguments of each module.
        devices: the modules' devices, which error messages contain; an accelerator becomes the current device of its
            thread.

    Raises:
        ValueError: the arguments have different lengths.
        Exception: the error that a module raised; its message contains the replica, its device, and the traceback.
    """
    keywords = [{}] * len(modules) if kwargs_tup is None else list(kwargs_tup)
    chosen: Sequence[Device] = ["cpu"] * len(modules) if devices is None else list(devices)
    if not len(modules) == len(inputs) == len(keywords) == len(chosen):
        raise ValueError(
            f"parallel_apply got {len(modules)} modules, {len(inputs)} inputs, {len(keywords)} kwargs_tup and "
            f"{len(chosen)} devices; it needs as many of each"
        )
    results: list[object] = [None] * len(modules)
    in_mode = _ThreadModes(to_device(device) for device in chosen)

    def run(index: int) -> None:
        device = to_device(chosen[index])
        given = inputs[index]
        arguments = given if isinstance(given, (list, tuple)) else (given,)
        try:
            with in_mode.entered(device):
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


class _ThreadModes:
    """The grad mode, inference mode, autocast and streams of the thread that creates this object.

    Args:
        devices: the devices whose current streams are recorded.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = {device: current_stream(device) for device in devices if device.type not in ("cpu", "meta")}
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kinds = {"cpu", *(device.type for device in self._streams)}
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Applies these modes in another thread, whose current device becomes `device`."""
        with ExitStack() as stack:
            # The parameters and inputs were copied on the caller's stream, and its later work runs on that stream too.
            if device in self._streams:
                stack.enter_context(activated(device))
                stack.enter_context(on_stream(device, self._streams[device]))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._autocast_cache))
            yield


def replicate(module: nn.Module, devices: Sequence[Device], detach: bool = False) -> list[nn.Module]:
    """Returns a replica of `module` for each device.

    The replicas have copies in place of parameters. Backward passes through these to the parameters of the module,
    where the gradients of all replicas are added. The first replica has the module's own buffers, so updates that
    forward makes (for example BatchNorm's) persist; the others have copies.

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
    return param.view_as(param) if param.device == device else _moved(param, device)


class DataParallel(nn.Module):
    """Splits the batch between devices, runs a replica of `module` on each in a thread, and concatenates the outputs.

    Replicas are created for each forward, and their gradients are added in the module. The threads share one Python
    interpreter, and the module is copied in every step: `DistributedDataParallel`, with a process for each device, is
    faster.

    Args:
        module: a module whose parameters are on the first device.
        device_ids: the devices, which may repeat, as in `["cpu", "cpu"]`; a number means a GPU. None means all GPUs, or
            all devices of another accelerator; if there are none, the module is called directly.
        output_device: the device of the concatenated outputs; the first device if None.
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
        ids: Sequence[Device] = range(torch.accelerator.device_count()) if device_ids is None else device_ids
        self.device_ids = [to_device(device) for device in ids]
        self.output_device = self.device_ids[0] if self.device_ids else torch.device("cpu")
        if output_device is not None:
            self.output_device = to_device(output_device)
        absent = absent_device_text(self.device_ids, self.output_device)
        if absent is not None:
            raise ValueError(absent)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Calls the replicas with parts of the batch; arguments other than tensors are passed to every replica."""
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
        inputs: the inputs of the module: a tuple of arguments, or a single argument.
        module_kwargs: the keyword arguments of the module.
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
    """Calls replicas of the module with parts of the batch; a single part is passed to `call`, or to the module."""
    parts = scatter_arguments(args, kwargs, devices, dim)
    used = devices[: len(parts)]
    if len(used) == 1:
        return (call or module)(*parts[0][0], **parts[0][1])
    replicas = replicate(module, used, detach=not torch.is_grad_enabled())
    outputs = parallel_apply(replicas, [part[0] for part in parts], [part[1] for part in parts], used)
    return gather(outputs, output_device, dim)


def require_on(module: nn.Module, device: torch.device) -> None:
    """Requires that the module is on `device`.

    Raises:
        RuntimeError: a parameter or buffer is not on `device`; the message contains its name.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != device:
            raise RuntimeError(wrong_device_text(name, tensor, device))
