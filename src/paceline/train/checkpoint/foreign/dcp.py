"""Reads directories written by torch.distributed.checkpoint (DCP), which FSDP, DTensor and others use.

The `.metadata` file is a pickle, which is read without running code. Only the names of torch's metadata classes and
their members are accepted. Instances of these classes become records instead of torch objects, so metadata from any
version of torch can be read with any other version. Every name and number is checked before it is used. The blocks of a
tensor must cover the tensor exactly once, and no value's path may be a prefix of another's.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import torch

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.foreign.record_unpickler import (
    Global,
    Make,
    PickledRecord,
    UnneededPickleError,
    reason_of,
    require_sound_torch_file,
    unpickle,
)
from paceline.train.checkpoint.format.local_storage import open_regular
from paceline.train.checkpoint.format.regions import TensorBlock, blocks_overlap, is_grid
from paceline.train.checkpoint.format.safetensors_header import BEYOND
from paceline.train.checkpoint.format.values import TensorRef, escaped
from paceline.train.checkpoint.pytree import TensorInfo, infos_of, take_apart

_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX = Global(_METADATA, "MetadataIndex")
_DEEPEST_PATH = 64
_MOST_IRREGULAR = 1000  # maximum number of blocks that do not form a grid; all pairs of such blocks are compared


class _UnsoundMetadataError(Exception):
    """Raised if the metadata does not describe a checkpoint."""


_KNOWN: dict[Global, Make] = {
    **{
        Global(_METADATA, name): PickledRecord
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    },
    Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"): PickledRecord,
    Global("torch", "Size"): lambda _, args: args[0] if args else (),  # called with one tuple as its argument
    Global("torch.serialization", "_get_layout"): PickledRecord,
    Global("collections", "OrderedDict"): lambda *_: {},
    # Some versions of Python pickle enumeration members as calls to getattr.
    Global("builtins", "getattr"): lambda _, args: args[-1] if args else None,
    Global("builtins", "set"): PickledRecord,
}  # fmt: skip
_DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


def _known(found: Global) -> Make | None:
    if found in _KNOWN:
        return _KNOWN[found]
    is_dtype = found.module == "torch" and found.name in _DTYPES
    is_path = found.module.split(".")[0] == "pathlib" and found.name in ("PosixPath", "PurePosixPath", "Path")
    return PickledRecord if is_dtype or is_path else None


def _key_of(record: PickledRecord) -> object:
    """Converts a `MetadataIndex` to a key for the table of blocks."""
    if record.made_by != _INDEX:
        raise UnneededPickleError(f"it uses a {record.made_by.name} as a key")
    offset = record["offset"]
    # The key is a flat tuple. Objects have the offset None.
    return (record["fqn"], *(offset if isinstance(offset, tuple) else (offset,)))


@dataclass(frozen=True)
class DcpChunk:
    """The location of a tensor block or of a whole object.

    Attributes:
        offset: the offset of the block in the tensor.
        start: the offset of the chunk's first byte in the file, in bytes.
        transforms: the names of the transformations that DCP has applied to the bytes.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int
    transforms: tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """A tensor or an object, with its chunks and its path in the nested state. The dtype of an object is None."""

    dtype: str | None
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]
    path: tuple[str | int, ...]


def read_metadata(data: bytes, where: str) -> dict[str, Item]:
    """Returns the items in a directory, by name, given the content of its `.metadata` file and the file's name.

    Raises CheckpointError if the pickle uses operations that metadata does not need, or does not describe a checkpoint,
    and CheckpointDamagedError if it cannot be read.
    """
    try:
        metadata = unpickle(data, _known, _key_of)
        if not isinstance(metadata, PickledRecord) or metadata.made_by != Global(_METADATA, "Metadata"):
            raise _UnsoundMetadataError("it holds no metadata of torch.distributed.checkpoint")
        return _Reader(metadata, most_blocks=len(data)).items()
    except UnneededPickleError as error:
        why = f"{error}, which the metadata of a checkpoint does not need"
        raise CheckpointError(f"{where} was not read: {why}") from None
    except _UnsoundMetadataError as error:
        raise CheckpointError(f"{where} was not read: {error}") from None
    except ValueError as error:
        raise CheckpointDamagedError(f"{where} cannot be read: {error}") from error


class _Reader:
    """Checks the records in the metadata, and converts them to items.

    Metadata with more than `most_blocks` blocks is rejected. Each block in valid metadata takes at least a byte, but
    malicious metadata could share one long list of blocks among many tensors.
    """

    def __init__(self, metadata: PickledRecord, most_blocks: int) -> None:
        self._described = _dict(metadata["state_dict_metadata"], "the contents of the checkpoint")
        self._table = _dict(metadata["storage_data"], "their locations")
        self._paths = _dict(metadata["planner_data"] or {}, "their nesting")
        self._blocks_left = most_blocks

    def items(self) -> dict[str, Item]:
        items = {_text(name, "a name"): self._item(str(name), found) for name, found in self._described.items()}
        paths = {item.path for item in items.values()}
        through = {path[:depth] for path in paths for depth in range(len(path))}
        if len(paths) < len(items) or through & paths:
            raise _UnsoundMetadataError("it has two values at one place, or one within another")
        _require_separate([item.chunks[0] for item in items.values() if item.dtype is None])
        return items

    def _item(self, name: str, found: object) -> Item:
        path = self._paths.get(name, (name,))
        if (
            not isinstance(path, tuple)
            or not 0 < len(path) <= _DEEPEST_PATH
            or not all(type(key) is str or type(key) is int for key in path)
        ):
            raise _UnsoundMetadataError(f"the path of {name} is not a tuple of keys")
        if not isinstance(found, PickledRecord):
            raise _UnsoundMetadataError(f"it does not describe {name}")
        if found.made_by == Global(_METADATA, "BytesStorageMetadata"):
            return Item(None, (), (self._chunk(name, None, ()),), path)
        shape = _sizes(found["size"], f"the shape of {name}")
        blocks = self._blocks(name, found["chunks"], shape)
        chunks = tuple(self._chunk(name, offset, sizes) for offset, sizes in blocks.items())
        return Item(_dtype(found["properties"], name), shape, chunks, path)

    def _blocks(self, name: str, found: object, shape: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of a tensor's non-empty blocks, by offset."""
        if not isinstance(found, list):
            raise _UnsoundMetadataError(f"it has no list of the blocks of {name}")
        self._blocks_left -= len(found)
        if self._blocks_left < 0:
            raise _UnsoundMetadataError("it has more blocks than bytes")
        blocks: dict[tuple[int, ...], tuple[int, ...]] = {}
        for block in found:
            if not isinstance(block, PickledRecord):
                raise _UnsoundMetadataError(f"it does not describe a block of {name}")
            offset = _sizes(block["offsets"], f"the offset of a block of {name}")
            sizes = _sizes(block["sizes"], f"the shape of a block of {name}")
            if math.prod(sizes) and blocks.setdefault(offset, sizes) != sizes:
                raise _UnsoundMetadataError(f"two blocks of {name} begin at {offset}")
        if not _is_covered(shape, blocks):
            raise _UnsoundMetadataError(f"the blocks of {name} do not cover its shape {shape} exactly once")
        return blocks

    def _chunk(self, name: str, offset: tuple[int, ...] | None, shape: tuple[int, ...]) -> DcpChunk:
        info = self._table.get((name, *((None,) if offset is None else offset)))
        if not isinstance(info, PickledRecord):
            raise _UnsoundMetadataError(f"it does not contain the location of {name} at {offset}")
        file = _text(info["relative_path"], f"the file of {name}")
        start, nbytes = _sizes((info["offset"], info["length"]), f"the location of {name} in {file!r}")
        transforms = info["transform_descriptors"] or ()
        if not isinstance(transforms, (list, tuple)):
            raise _UnsoundMetadataError(f"{name} was transformed by something that is not listed")
        named = tuple(_text(transform, f"a transformation of {name}") for transform in transforms)
        return DcpChunk(offset or (), shape, file, start, nbytes, named)


def _require_separate(chunks: list[DcpChunk]) -> None:
    """Checks that no two objects share bytes, because each object is loaded into memory separately."""
    ranges = sorted((os.path.normpath(chunk.file), chunk.start, chunk.nbytes) for chunk in chunks if chunk.nbytes)
    for (file, start, nbytes), (other, begin, _) in pairwise(ranges):
        if file == other and begin < start + nbytes:
            raise _UnsoundMetadataError(f"two of its objects have the byte {begin:,} of {file!r}")


def _dict(value: object, what: str) -> Mapping[object, object]:
    if not isinstance(value, dict):
        raise _UnsoundMetadataError(f"it has no table for {what}")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value):
        raise _UnsoundMetadataError(f"{what} is not text")
    return value


def _sizes(value: object, what: str) -> tuple[int, ...]:
    if (
        not isinstance(value, (tuple, list))
        or len(value) > _DEEPEST_PATH
        or not all(type(size) is int and 0 <= size < BEYOND for size in value)
    ):
        raise _UnsoundMetadataError(f"{what} does not consist of sizes")
    return tuple(value)


def _dtype(properties: object, name: str) -> str:
    state = properties.state if isinstance(properties, PickledRecord) else None
    found = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(found, Global) or found.module != "torch" or found.name not in _DTYPES:
        raise _UnsoundMetadataError(f"{name} has an unknown type")
    return found.name


def _is_covered(shape: tuple[int, ...], blocks: Mapping[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Returns True if each element of a tensor is in exactly one of the non-empty `blocks` (shapes by offset)."""
    if sum(map(math.prod, blocks.values())) != math.prod(shape):
        return False
    for offset, sizes in blocks.items():
        if not len(offset) == len(sizes) == len(shape):
            return False
        if any(first + size > whole for first, size, whole in zip(offset, sizes, shape, strict=True)):
            return False
    if not blocks:
        return True
    # Blocks that lie inside a tensor cover the tensor if no two of them overlap and their volumes add up to its volume.
    tensor_blocks = [TensorBlock(offset, sizes) for offset, sizes in blocks.items()]
    if is_grid(shape, tensor_blocks):
        return True
    if len(blocks) > _MOST_IRREGULAR:
        return False
    return not any(blocks_overlap(one, other) for one, other in combinations(tensor_blocks, 2))


class DcpDirectory:
    """A directory written by DCP. Objects are read when the directory is opened, and tensors are read on demand."""

    kind = "a torch.distributed.checkpoint directory"

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._items = {
            escaped(name): item
            for name, item in read_metadata(_read(path / ".metadata"), str(path / ".metadata")).items()
        }
        self._nested: dict[str, torch.Tensor] = {}  # tensors inside objects, by name
        self.tensors = {
            name: TensorInfo(_dtype_named(item.dtype, self.path), item.shape)
            for name, item in self._items.items()
            if item.dtype is not None
        }
        self.tree = _nested([(item.path, self._leaf(name, item)) for name, item in self._items.items()])

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU, assembled from its chunks."""
        if name in self._nested:
            return self._nested[name]
        info, chunks = self.tensors[name], self._items[name].chunks
        for chunk in chunks:  # checked before memory is allocated
            file = self._inside(chunk.file)
            size = file.stat().st_size if file.exists() else 0
            if min(chunk.nbytes, size) < math.prod(chunk.shape) * info.dtype.itemsize:
                raise CheckpointDamagedError(
                    f"{self.path}/{chunk.file} is missing or truncated: it has too few bytes for the block "
                    f"{list(chunk.shape)} of {name} at {chunk.offset}"
                )
        whole = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        for chunk in chunks:
            part = self._load(name, chunk)
            expected = (chunk.shape, info.dtype, torch.strided, torch.device("cpu"))
            if (
                not isinstance(part, torch.Tensor)
                or (tuple(part.shape), part.dtype, part.layout, part.device) != expected
            ):
                raise CheckpointDamagedError(f"{self.path}/{chunk.file} does not hold {name} at {chunk.offset}")
            target = whole
            for axis, (first, size) in enumerate(zip(chunk.offset, chunk.shape, strict=True)):
                target = target.narrow(axis, first, size)
            target.copy_(part)
        return whole

    def _leaf(self, name: str, item: Item) -> object:
        if item.dtype is not None:
            return TensorRef(name)
        held: dict[str, torch.Tensor] = {}
        try:
            value = take_apart(name, self._load(name, item.chunks[0]), held)
        except RecursionError:
            raise CheckpointDamagedError(f"{self.path}: {name} is nested too deeply") from None
        except TypeError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from None
        self._nested.update(held)
        self.tensors.update(infos_of(held))
        return value

    def _load(self, name: str, chunk: DcpChunk) -> object:
        if chunk.transforms:
            raise CheckpointError(
                f"{self.path}/{chunk.file} holds {name} transformed by {', '.join(chunk.transforms)}, which only "
                "torch.distributed.checkpoint can undo; load it there, and save it with paceline.save"
            )
        try:
            data = io.BytesIO(_read(self._inside(chunk.file), chunk.start, chunk.nbytes))
            require_sound_torch_file(data, f"{name} in {self.path}/{chunk.file}")
            with torch.sparse.check_sparse_tensor_invariants():
                return torch.load(data, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self.path}/{chunk.file} holds an object for {name}, and unpickling objects can run any code that "
                f"the file specifies: {reason_of(error)}. Leave it out of the state that is saved, or save "
                "plain values"
            ) from None
        except CheckpointError:
            raise
        except Exception as error:  # loading a damaged pickle can raise any exception
            raise CheckpointDamagedError(f"{self.path}/{chunk.file} has no readable {name}: {error}") from error

    def _inside(self, file: str) -> Path:
        """Returns the path of a file listed in the metadata. The path must be inside the directory."""
        top = Path(self.path).resolve()
        path = (top / file).resolve()
        if not path.is_relative_to(top):
            raise CheckpointError(f"{self.path}/.metadata refers to {file}, which is outside of the directory")
        return path


def _dtype_named(name: str, where: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"{where} has elements of the type {name}, which torch {torch.__version__} does not have; use a later torch"
        )
    return found


def _read(path: Path, start: int = 0, nbytes: int = -1) -> bytes:
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if start + max(nbytes, 0) > size:
                raise CheckpointDamagedError(f"{path} is truncated: it ends before byte {start + nbytes:,}")
            file.seek(start)
            return file.read(nbytes)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{path} is missing") from None


@dataclass
class _Leaf:
    """A saved value. The class distinguishes a saved dict from the dicts that are built from the paths."""

    value: object


def _nested(leaves: list[tuple[tuple[str | int, ...], object]]) -> object:
    """Builds nested dicts and lists from the leaves and their paths. Integers in a path are list indices."""
    top: dict[str | int, object] = {}
    for path, leaf in leaves:
        inner: dict[str | int, object] = top
        for key in path[:-1]:
            inner = inner.setdefault(key, {})  # type: ignore[assignment]  # no path passes through a leaf
        inner[path[-1]] = _Leaf(leaf)
    return _with_lists(top)


def _with_lists(value: object) -> object:
    if isinstance(value, _Leaf):
        return value.value
    assert isinstance(value, dict)
    inner = {key: _with_lists(member) for key, member in value.items()}
    if inner and all(type(key) is int for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
