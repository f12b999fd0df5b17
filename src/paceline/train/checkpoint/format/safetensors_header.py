"""Headers of safetensors files: an 8-byte length, followed by JSON that maps tensors to byte ranges.

See https://github.com/huggingface/safetensors#format. The safetensors package is not used for headers, because files
are written as streams: each block is hashed as it is written, and the file is made durable at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from paceline.errors import and_more

ITEMSIZE = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
    "C128": 16,
}
# Types that safetensors lacks or supports only in its latest versions. Their elements are stored as bytes, and the
# manifest records the type.
_STORED_AS_BYTES = frozenset(("C64", "C128", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
_LENGTH_NBYTES = 8
_ALIGNMENT = 8
_PAGE_NBYTES = 4096  # the data of large files is aligned to pages for direct writes
_LARGE_NBYTES = 1 << 20
_LONGEST = 100 << 20  # maximum size of the JSON text, as in the safetensors package
LONGEST_HEADER_NBYTES = _LENGTH_NBYTES + _LONGEST
_METADATA = "__metadata__"
MOST_DIMENSIONS = 64  # as in torch; the size of a tensor with many large dimensions would take a long time to compute
BEYOND = 1 << 63  # all valid sizes, strides and offsets are smaller


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its key, dtype and shape, and the offset of its first byte in the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return nbytes_of(self.dtype, self.shape)


def header_of(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[StoredTensor]]:
    """Returns the header of a file, and the tensors with their offsets.

    The tensors are given by key, dtype and shape, in byte order. Raises ValueError if two of them have the same key.
    """
    members: dict[str, object] = {_METADATA: {"format": "pt"}}
    end = 0
    for key, dtype, shape in tensors:
        if key in members:
            raise ValueError(f"two tensors would have the key {key!r} in one file; give one of them another name")
        nbytes = nbytes_of(dtype, shape)
        stored, stored_shape = ("U8", (nbytes,)) if dtype in _STORED_AS_BYTES else (dtype, shape)
        begin, end = end, end + nbytes
        members[key] = {"dtype": stored, "shape": stored_shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(members)
    alignment = _PAGE_NBYTES if end >= _LARGE_NBYTES else _ALIGNMENT
    text += b" " * (-(_LENGTH_NBYTES + len(text)) % alignment)
    header = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    stored_tensors, offset = [], len(header)
    for key, dtype, shape in tensors:
        stored_tensors.append(StoredTensor(key, dtype, shape, offset))
        offset += nbytes_of(dtype, shape)
    return header, stored_tensors


def read_header(header: bytes | bytearray) -> list[StoredTensor]:
    """Returns the tensors in a file, given its header.

    Raises ValueError if the header is not that of a safetensors file, or its tensors overlap or have gaps between them.
    """
    try:
        raw = msgspec.json.decode(header[_LENGTH_NBYTES:], type=dict[str, msgspec.Raw])
        msgspec.json.decode(raw.pop(_METADATA, msgspec.Raw(b"{}")), type=dict[str, str])  # checked, but not used
        infos = {key: msgspec.json.decode(text, type=_Info) for key, text in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its header is not that of a safetensors file: {error}") from None
    for key, info in infos.items():
        is_sound = info.dtype in ITEMSIZE and is_shape(info.shape)
        if not is_sound or nbytes_of(info.dtype, info.shape) != info.data_offsets[1] - info.data_offsets[0]:
            shape = and_more(info.shape, MOST_DIMENSIONS)
            raise ValueError(f"its header has {info.dtype} [{shape}] with bytes {info.data_offsets} for {key}")
    end = 0
    for key, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        if info.data_offsets[0] != end:
            raise ValueError(
                f"the bytes {info.data_offsets} of {key} do not begin at {end}, where the preceding bytes end"
            )
        end = info.data_offsets[1]
    return [
        StoredTensor(key, info.dtype, info.shape, len(header) + info.data_offsets[0]) for key, info in infos.items()
    ]


def length_of(beginning: bytes | bytearray) -> int:
    """Returns the length of a file's header in bytes, given the first 8 bytes of the file, which it includes.

    Raises ValueError if the file is not a safetensors file.
    """
    length = int.from_bytes(beginning[:_LENGTH_NBYTES], "little")
    if len(beginning) < _LENGTH_NBYTES or length > _LONGEST:
        raise ValueError("it does not begin with the length of a header, as a safetensors file does")
    return _LENGTH_NBYTES + length


@dataclass
class _Info:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def is_shape(shape: tuple[int, ...]) -> bool:
    """Returns True if a tensor can have this shape."""
    return len(shape) <= MOST_DIMENSIONS and all(0 <= size < BEYOND for size in shape)


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the size of a tensor in bytes."""
    return ITEMSIZE[dtype] * prod(shape)
