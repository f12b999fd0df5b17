"""Converts nested containers of tensors to the plain values and bytes that a checkpoint holds, and back.

`take_apart` separates the tensors in a tree from its plain values, and `put_together` is the inverse. A checkpoint
holds plain values of only a few types, so an instance of a subclass, such as Counter, is saved as the plain type. On
loading, `with_classes_of` converts such a value to the class that it has in the state to be restored.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from paceline.train.checkpoint.format.values import DType, TensorRef, join

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",  # available in torch 2.7 and later
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
    "C128": "complex128",
}
_TORCHS: dict[str, torch.dtype] = {
    name: getattr(torch, torchs) for name, torchs in _NAMES.items() if hasattr(torch, torchs)
}
_OURS = {torchs: name for name, torchs in _TORCHS.items()}


def name_of(dtype: torch.dtype) -> str:
    """Returns the safetensors name of a dtype; raises TypeError if a checkpoint cannot hold it."""
    if dtype not in _OURS:
        raise TypeError(f"a checkpoint cannot hold tensors of {dtype}; it holds {', '.join(_OURS.values())}")
    return _OURS[dtype]


def type_of(name: str) -> torch.dtype:
    """Returns the dtype with a safetensors name; raises TypeError if this version of torch does not have it."""
    if name not in _TORCHS:
        raise TypeError(
            f"the checkpoint has elements of the type {name}, which torch {torch.__version__} does not have"
        )
    return _TORCHS[name]


def memory_with(tensor: torch.Tensor) -> memoryview:
    """Returns a view of the memory of a contiguous CPU tensor. The view keeps the tensor alive."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


_PLAIN = (bool, int, float, complex)  # bool must precede int, its base class
_DUPLICATE = "%"  # no escaped key ends with this character


class CircularTreeError(ValueError):
    """Raised if a container in a tree contains itself, directly or within other containers."""


Enclosing: TypeAlias = Mapping[int, str]
"""The names of the containers that hold a value, directly or within others, by the containers' `id`."""


def enclosed(name: str, container: object, enclosing: Enclosing) -> Enclosing:
    """Returns `enclosing` with the container `name` added; raises CircularTreeError if that contains itself."""
    outer = enclosing.get(id(container))
    if outer is not None:
        kind = type(container).__name__
        of = f"{outer!r}" if outer else "the whole state"
        raise CircularTreeError(
            f"{name!r} is the {kind} that contains it ({of}); a checkpoint cannot hold a {kind} that contains itself. "
            f"Remove {name!r} from the state"
        )
    return {**enclosing, id(container): name}


def take_apart(
    name: str, value: object, tensors: dict[str, torch.Tensor], enclosing: Enclosing = MappingProxyType({})
) -> object:
    """Returns `value` with its tensors replaced by references, and adds the tensors to `tensors` by name.

    `enclosing` are the containers that hold the value. Raises TypeError for a dtype that a checkpoint cannot hold, and
    CircularTreeError for a container that contains itself.
    """
    if isinstance(value, torch.Tensor):
        while name in tensors:  # for example, if a dict has the keys 1 and "1"
            name += _DUPLICATE
        tensors[name] = value
        return TensorRef(name)
    if isinstance(value, torch.dtype):
        return DType(name_of(value))
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, Mapping):
        inside = enclosed(name, value, enclosing)
        return {_plain(key): take_apart(join(name, key), member, tensors, inside) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        inside = enclosed(name, value, enclosing)
        parts = [take_apart(join(name, index), member, tensors, inside) for index, member in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    return _plain(value)


def _plain(value: object) -> object:
    """Converts an instance of a subclass of a number type or of `str`, such as an enum member, to the base type."""
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enumeration member returns its name
    for kind in _PLAIN:
        if isinstance(value, kind):
            make: Any = kind
            return value if type(value) is kind else make(value)
    return value


def put_together(value: object, tensor_of: Callable[[str], torch.Tensor]) -> object:
    """Returns the tree that was passed to `take_apart`, with plain containers."""
    if isinstance(value, TensorRef):
        return tensor_of(value.name)
    if isinstance(value, DType):
        return type_of(value.name)
    if isinstance(value, dict):
        return {key: put_together(member, tensor_of) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [put_together(member, tensor_of) for member in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def with_classes_of(value: Any, like: Any) -> Any:
    """Converts the containers in `value` to the classes of those in `like`."""
    if isinstance(value, dict) and isinstance(like, Mapping):
        items = {key: with_classes_of(member, like.get(key)) for key, member in value.items()}
        if type(like) is dict or not isinstance(like, dict):
            return items
        kept = copy.copy(like)
        kept.clear()
        kept.update(items)
        return kept
    if isinstance(value, tuple) and isinstance(like, tuple):
        parts = [with_classes_of(*pair) for pair in zip(value, [*like, *value][: len(value)], strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    if isinstance(value, str) and isinstance(like, torch.device):
        return torch.device(value)
    return value


@contextlib.contextmanager
def copying_into(targets: Iterable[torch.Tensor]) -> Iterator[None]:
    """Permits copies into tensors in a `with` block, even into leaves of a graph and tensors made in inference mode."""
    with torch.inference_mode(any(target.is_inference() for target in targets)), torch.no_grad():
        yield


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def infos_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Returns the dtypes and shapes of tensors, by name."""
    return {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
