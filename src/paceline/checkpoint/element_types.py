"""Torch's element types by the names that a checkpoint gives them."""

from __future__ import annotations

import torch

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",  # torch 2.7 and later
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
    """Returns the name of a type.

    Raises:
        TypeError: a checkpoint cannot hold tensors of it.
    """
    if dtype not in _OURS:
        raise TypeError(f"a checkpoint cannot hold tensors of {dtype}; it holds {', '.join(_OURS.values())}")
    return _OURS[dtype]


def type_of(name: str) -> torch.dtype:
    """Returns the type of that name.

    Raises:
        TypeError: this version of torch does not have it.
    """
    if name not in _TORCHS:
        raise TypeError(
            f"the checkpoint has elements of the type {name}, which torch {torch.__version__} does not have"
        )
    return _TORCHS[name]
