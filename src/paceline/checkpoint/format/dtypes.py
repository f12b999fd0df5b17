"""The types of elements, by the names that safetensors gives them, and their sizes."""

from __future__ import annotations

from math import prod

ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
    "C128": 16,
}
# Types that safetensors does not have, or only in its latest versions, are bytes in the file and typed in the manifest.
_STORED_AS_BYTES = frozenset(("C64", "C128", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the size of a tensor in bytes."""
    return ITEMSIZE[dtype] * prod(shape)


def as_stored(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the type and shape that the safetensors file states, which every version of safetensors can read."""
    return ("U8", (nbytes_of(dtype, shape),)) if dtype in _STORED_AS_BYTES else (dtype, shape)
