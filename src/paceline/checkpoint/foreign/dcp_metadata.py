"""Reads the `.metadata` of torch.distributed.checkpoint, a pickle, by an unpickler that makes inert records only.

It knows the names of torch's metadata classes, and of what they hold, and refuses all others. The records are not
torch's classes, so nothing of torch runs, and any version of torch can read the metadata of any other.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from paceline.errors import CheckpointDamagedError, CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"


class _Record:
    """Takes whatever state a pickle has for one of torch's objects."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = tuple(state) if isinstance(state, (tuple, list)) else (state,)


class _Metadata(_Record):
    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any] | None = None
    planner_data: dict[str, Any] | None = None


class _Tensor(_Record):
    properties: _Record
    size: tuple[int, ...]
    chunks: list[Any]


class _Bytes(_Record):
    pass


class _Index(_Record):
    """A key of the table that says where chunks are; equal if name and offset are, as torch's."""

    fqn: str = ""
    offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


def _size(values: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(values)


def _member(_: type, name: str) -> str:
    """Stands for `getattr`, by which some versions of Python pickle members of an enumeration."""
    return name


_KNOWN: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "getattr"): _member,
    ("builtins", "set"): set,
}
_DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and name in _DTYPES:
            return name
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath", "Path"):
            return PurePosixPath
        raise CheckpointError(f"it names {module}.{name}, which the metadata of a checkpoint has no need for")


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, or a whole object: where its bytes are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    nbytes: int
    transforms: tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """A tensor, with its type and shape, or an object, without; its chunks, and its place in the nested state."""

    dtype: str | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    path: tuple[str | int, ...]


def read_metadata(data: bytes, where: str) -> dict[str, Item]:
    """Returns what a directory of torch.distributed.checkpoint holds.

    Args:
        data: of its `.metadata`.
        where: the file's name, for errors.

    Raises:
        CheckpointError: the pickle wants more than metadata needs.
        CheckpointDamagedError: it cannot be read.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, _Metadata) or metadata.storage_data is None:
            raise CheckpointError("it holds no metadata of torch.distributed.checkpoint")
        return {name: _item(name, each, metadata) for name, each in metadata.state_dict_metadata.items()}
    except CheckpointError as error:
        raise CheckpointError(f"{where} was not read: {error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointDamagedError(f"{where} cannot be read: {type(error).__name__}: {error}") from error


def _item(name: str, found: Any, metadata: _Metadata) -> Item:
    path = tuple((metadata.planner_data or {}).get(name, (name,)))
    if isinstance(found, _Tensor):
        chunks = tuple(_chunk(name, tuple(each.offsets), tuple(each.sizes), metadata) for each in found.chunks)
        return Item(str(found.properties.args[0]), tuple(found.size), chunks, path)
    return Item(None, (), (_chunk(name, None, (), metadata),), path)


def _chunk(name: str, offset: tuple[int, ...] | None, shape: tuple[int, ...], metadata: _Metadata) -> Chunk:
    index = _Index()
    index.fqn, index.offset = name, offset
    table = metadata.storage_data or {}
    if index not in table:
        raise CheckpointError(f"it does not say where {name} at {offset} is")
    info = table[index]
    transforms = tuple(getattr(info, "transform_descriptors", None) or ())
    return Chunk(offset or (), shape, info.relative_path, info.offset, info.length, transforms)
