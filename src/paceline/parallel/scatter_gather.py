"""Splits a call's arguments between devices, and puts their results together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

Device = torch.device | str | int


def to_device(device: Device) -> torch.device:
    """Returns the device; a bare number means a GPU."""
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return chosen


def scatter(value: object, devices: Sequence[Device], dim: int = 0) -> list[object]:
    """Splits every tensor in `value` along `dim`, one part for each device.

    Tensors may be nested in lists, tuples, named tuples, mappings and dataclasses; everything else goes to all devices.

    Args:
        value: an object of any kind.
        devices: a device may be named several times.
        dim: the batch dimension; tensors with fewer dimensions go whole to every device.

    Returns:
        A list with a value for each device; it has fewer, but at least one, if the batch is smaller than their number.

    >>> [part.tolist() for part in scatter(torch.arange(5), ["cpu", "cpu"])]
    [[0, 1, 2], [3, 4]]
    """
    sizes = {tensor.shape[dim] for tensor in _tensors(value) if tensor.dim() > dim}
    count = min([len(devices), *(_chunks(size, len(devices)) for size in sizes)])

    def part(at: int) -> object:
        return map_tensors(value, lambda tensor: _part(tensor, at, count, dim, to_device(devices[at])))

    return [part(at) for at in range(count)]


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
        TypeError: such values differ, or the outputs have different types.
    """
    first = outputs[0]
    device = to_device(output_device)
    if isinstance(first, torch.Tensor):
        tensors = [each for each in outputs if isinstance(each, torch.Tensor)]
        if len(tensors) == len(outputs):
            moved = [tensor.to(device) for tensor in tensors]
            return torch.stack(moved) if first.dim() == 0 else torch.cat(moved, dim)
    if any(type(each) is not type(first) for each in outputs):
        kinds = sorted({type(each).__name__ for each in outputs})
        raise TypeError(
            f"the replicas returned outputs of the types {' and '.join(kinds)}; forward must return the same type on "
            "every device, whatever the batch"
        )
    inner = [_children(each) for each in outputs]
    if inner[0] is None:
        if any(each != first for each in outputs):
            raise TypeError(
                f"the replicas returned different values of type {type(first).__name__}: "
                f"{', '.join(map(repr, outputs))}; only tensors can be concatenated, so forward must return a "
                "tensor here"
            )
        return first
    lists = [each for each in inner if each is not None]
    if len({tuple(each) for each in lists}) != 1:
        raise TypeError(
            f"the replicas returned values of type {type(first).__name__} with different entries: "
            f"{' and '.join(str(list(each)) for each in lists)}; forward must return the same entries on every device, "
            "whatever the batch"
        )
    return _with_children(first, {key: gather([each[key] for each in lists], device, dim) for key in lists[0]})


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Returns a copy of a nest of lists, tuples, mappings and dataclasses, with `change` applied to its tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    children = _children(value)
    if children is None:
        return value
    return _with_children(value, {key: map_tensors(child, change) for key, child in children.items()})


def _chunks(size: int, count: int) -> int:
    """Returns how many parts torch.chunk makes of `size` when asked for `count`."""
    return -(-size // -(-size // count)) if size else 1


def _part(tensor: torch.Tensor, at: int, count: int, dim: int, device: torch.device) -> torch.Tensor:
    if tensor.dim() <= dim:
        return tensor.to(device)
    parts = tensor.chunk(count, dim)
    if len(parts) != count:
        # Another tensor of the call, with a smaller batch, has decided how many parts there are.
        parts = tensor.tensor_split(count, dim)
    return parts[at].to(device, non_blocking=True)


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    children = _children(value)
    return [] if children is None else [tensor for child in children.values() for tensor in _tensors(child)]


def _children(value: object) -> dict[object, object] | None:
    """Returns what a nest holds, by key; None if `value` is not a nest."""
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return None


def _with_children(value: object, children: dict[object, object]) -> object:
    """Returns a nest like `value` with other children."""
    make: Callable[..., object] = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return make(*children.values())
    if isinstance(value, (list, tuple)):
        return make(children.values())
    if isinstance(value, Mapping):
        return make(children.items())
    copied = object.__new__(type(value))  # works whatever arguments its __init__ takes
    copied.__dict__.update(value.__dict__)
    for name, child in children.items():
        object.__setattr__(copied, str(name), child)  # the dataclass may be frozen
    return copied
