"""The header of a safetensors file: its length in 8 bytes, then JSON that says which bytes are which tensor.

See https://github.com/huggingface/safetensors#format. The header is written here, and not by the safetensors package,
because files are written as a stream whose blocks are digested on the way and which is made durable at the end.

The types of elements, by the names that safetensors gives them, and their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec

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


_LENGTH_NBYTES = 8
_ALIGNMENT = 8
_PAGE_NBYTES = 4096  # the data of large files begin at a multiple, so that they can be written directly
_LARGE_NBYTES = 1 << 20
_LONGEST = 100 << 20  # as in the safetensors package
_METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its key, type, shape, and its first byte, counted from the file's beginning."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return nbytes_of(self.dtype, self.shape)


def header_of(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[StoredTensor]]:
    """Returns the header of a file, and where its tensors are in it.

    Args:
        tensors: key, type and shape of each, in the order of their bytes.
        metadata: text to keep beside them.

    Raises:
        ValueError: two of them have the same key.
    """
    members: dict[str, object] = {_METADATA: metadata or {"format": "pt"}}
    end = 0
    for key, dtype, shape in tensors:
        if key in members:
            raise ValueError(f"two tensors would have the key {key!r} in one file; give one of them another name")
        stored, stored_shape = as_stored(dtype, shape)
        begin, end = end, end + nbytes_of(dtype, shape)
        members[key] = {"dtype": stored, "shape": stored_shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(members)
    alignment = _PAGE_NBYTES if end >= _LARGE_NBYTES else _ALIGNMENT
    text += b" " * (-(_LENGTH_NBYTES + len(text)) % alignment)
    header = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    slots, at = [], len(header)
    for key, dtype, shape in tensors:
        slots.append(StoredTensor(key, dtype, shape, at))
        at += nbytes_of(dtype, shape)
    return header, slots


@dataclass
class _Info:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def length_of(beginning: bytes | bytearray) -> int:
    """Returns how long the header of a file is in all, from its first 8 bytes.

    Raises:
        ValueError: this is no safetensors file.
    """
    length = int.from_bytes(beginning[:_LENGTH_NBYTES], "little")
    if len(beginning) < _LENGTH_NBYTES or length > _LONGEST:
        raise ValueError("it does not begin with the length of a header, as a safetensors file does")
    return _LENGTH_NBYTES + length


def read_header(header: bytes | bytearray) -> tuple[list[StoredTensor], dict[str, str]]:
    """Returns where the tensors of a file are, and the metadata, from its header.

    Raises:
        ValueError: this is no safetensors file, or its tensors do not follow one another without gaps and overlaps.
    """
    try:
        raw = msgspec.json.decode(header[_LENGTH_NBYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(_METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        infos = {key: msgspec.json.decode(each, type=_Info) for key, each in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its header is not that of a safetensors file: {error}") from None
    for key, info in infos.items():
        is_sound = info.dtype in ITEMSIZE and all(size >= 0 for size in info.shape)
        if not is_sound or nbytes_of(info.dtype, info.shape) != info.data_offsets[1] - info.data_offsets[0]:
            raise ValueError(f"its header has {info.dtype} {list(info.shape)} with bytes {info.data_offsets} for {key}")
    end = 0
    for key, info in sorted(infos.items(), key=lambda each: each[1].data_offsets):
        if info.data_offsets[0] != end:
            raise ValueError(f"the bytes {info.data_offsets} of {key} do not begin at {end}, where those before end")
        end = info.data_offsets[1]
    slots = [
        StoredTensor(key, info.dtype, info.shape, len(header) + info.data_offsets[0]) for key, info in infos.items()
    ]
    return slots, metadata
