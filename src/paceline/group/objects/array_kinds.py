"""The kinds that carry tensors and NumPy arrays, whose memory is sent beside the msgpack.

The numbers of the kinds are part of the format.

Tensors and arrays arrive in memory of their own, contiguous and writable. NumPy is used only if the program has
already imported it.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import torch

from paceline.engine.codes import DTYPE_CODES
from paceline.group.objects.codec import Kind, MalformedPayload, Packer, Refused, Unpacker

_DTYPES = {str(dtype): dtype for dtype in DTYPE_CODES}
_ALL_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NDARRAY, _NUMPY_SCALAR = 35, 36
_NUMPY_TYPE = re.compile(r"[<>=|]?([?bBhHiIlLqQefdgFDG]|[mM]8(\[\d*\w+\])?|[SU][1-9]\d{0,8})")


def _shape(packed: object, nbytes: int, itemsize: int) -> list[int]:
    if type(packed) is not list or not all(type(size) is int and size >= 0 for size in packed):
        raise MalformedPayload(f"the shape {packed!r}")
    if math.prod(packed) * itemsize != nbytes:
        raise MalformedPayload(f"{nbytes} bytes for a shape of {packed} with {itemsize} bytes an element")
    return packed


def _pack_tensor(tensor: torch.Tensor, packer: Packer) -> object:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise Refused(f"a tensor of layout {tensor.layout}, nested or quantized; send tensor.to_dense() or its parts")
    if not tensor.is_cpu:
        raise Refused(f"a tensor on {tensor.device}, which the receiver may not have; send tensor.cpu()")
    if tensor.dtype not in DTYPE_CODES:
        raise Refused(f"a tensor of {tensor.dtype}; convert it first (tensor.to(...))")
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return [str(tensor.dtype), list(tensor.shape), tensor.requires_grad, packer.buffer(dense.view(torch.uint8))]


def _unpack_tensor(packed: Any, unpacker: Unpacker) -> torch.Tensor:
    name, shape, requires_grad, number = packed
    memory, dtype = unpacker.buffer(number), _DTYPES[name]
    return memory.view(dtype).view(_shape(shape, memory.nbytes, dtype.itemsize)).requires_grad_(requires_grad is True)


def _unpack_parameter(packed: Any, unpacker: Unpacker) -> object:
    tensor = _unpack_tensor(packed, unpacker)
    return torch.nn.Parameter(tensor.detach(), tensor.requires_grad)


def numpy_tag(kind: type) -> int | None:
    """Returns the tag of NumPy's type `kind`; None if it has no tag or is not a type of NumPy's."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if kind is numpy.ndarray:
        return _NDARRAY
    if issubclass(kind, numpy.generic) and kind.__module__ == "numpy" and numpy.dtype(kind).kind in "biufcmM":
        return _NUMPY_SCALAR
    return None


def _type_name(dtype: Any) -> str:
    name = dtype.str if dtype.kind in "mMSU" else (">" if dtype.byteorder == ">" else "=") + dtype.char
    if not _NUMPY_TYPE.fullmatch(name):
        raise Refused(f"a NumPy array of {dtype}; send its .tolist(), or the columns of a structured one")
    return str(name)


def _numpy_type(name: object) -> Any:
    import numpy

    if type(name) is not str or not _NUMPY_TYPE.fullmatch(name):
        raise MalformedPayload(f"the NumPy type {name!r}")
    return numpy.dtype(name)


def _pack_ndarray(array: Any, packer: Packer) -> object:
    import numpy

    name = _type_name(array.dtype)
    flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    memory = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
    return [name, list(array.shape), packer.buffer(memory)]


def _unpack_ndarray(packed: Any, unpacker: Unpacker) -> object:
    name, shape, number = packed
    memory, dtype = unpacker.buffer(number), _numpy_type(name)
    return memory.numpy().view(dtype).reshape(_shape(shape, memory.nbytes, dtype.itemsize))


def _unpack_scalar(packed: Any, unpacker: Unpacker) -> object:
    import numpy

    name, data = packed
    (scalar,) = numpy.frombuffer(data, _numpy_type(name))
    return scalar


ARRAYS: dict[int, Kind] = {
    30: Kind(torch.Tensor, _pack_tensor, _unpack_tensor),
    31: Kind(torch.nn.Parameter, _pack_tensor, _unpack_parameter),
    32: Kind(torch.Size, lambda v, p: list(v), lambda v, u: torch.Size(v)),
    33: Kind(torch.dtype, lambda v, p: str(v), lambda v, u: _ALL_DTYPES[v]),
    34: Kind(torch.device, lambda v, p: str(v), lambda v, u: torch.device(v)),
    _NDARRAY: Kind(None, _pack_ndarray, _unpack_ndarray),
    _NUMPY_SCALAR: Kind(None, lambda v, p: [_type_name(v.dtype), v.tobytes()], _unpack_scalar),
}
