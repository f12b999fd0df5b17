"""A directory of torch.distributed.checkpoint (DCP), as FSDP, DTensor and others save."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoint.foreign.dcp_metadata import Chunk, Item, read_metadata
from paceline.checkpoint.foreign.state import TensorInfo, infos_of
from paceline.checkpoint.format.regular_files import open_regular
from paceline.checkpoint.format.values import TensorRef
from paceline.checkpoint.names import escaped
from paceline.checkpoint.trees import take_apart
from paceline.errors import CheckpointDamagedError, CheckpointError


class DcpDirectory:
    """A directory of DCP. Objects are read at once, tensors when they are asked for."""

    kind = "a directory of torch.distributed.checkpoint"

    def __init__(self, path: Path) -> None:
        """Reads the directory's metadata and its objects.

        Raises:
            CheckpointError: it would have to be trusted to be read, or is compressed.
            CheckpointDamagedError: a file is missing or cut.
        """
        self.path = str(path)
        self._items = {
            escaped(name): item
            for name, item in read_metadata(_read(path / ".metadata"), str(path / ".metadata")).items()
        }
        self._nested: dict[str, torch.Tensor] = {}  # tensors within objects
        self.tensors = {
            name: TensorInfo(getattr(torch, item.dtype), item.shape)
            for name, item in self._items.items()
            if item.dtype is not None
        }
        self.tree = _nested([(item.path, self._leaf(name, item)) for name, item in self._items.items()])

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU, put together from its chunks."""
        if name in self._nested:
            return self._nested[name]
        info = self.tensors[name]
        whole = torch.empty(info.shape, dtype=info.dtype)
        for chunk in self._items[name].chunks:
            part = self._load(name, chunk)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != chunk.shape:
                raise CheckpointDamagedError(f"{self.path}/{chunk.file} does not hold {name} at {chunk.offset}")
            place = whole
            for axis, (first, size) in enumerate(zip(chunk.offset, chunk.shape, strict=True)):
                place = place.narrow(axis, first, size)
            place.copy_(part)
        return whole

    def _leaf(self, name: str, item: Item) -> object:
        if item.dtype is not None:
            return TensorRef(name)
        held: dict[str, torch.Tensor] = {}
        value = take_apart(name, self._load(name, item.chunks[0]), held)
        self._nested.update(held)
        self.tensors.update(infos_of(held))
        return value

    def _load(self, name: str, chunk: Chunk) -> object:
        if chunk.transforms:
            raise CheckpointError(
                f"{self.path}/{chunk.file} holds {name} transformed by {', '.join(chunk.transforms)}, which only "
                "torch.distributed.checkpoint can undo; load it there, and save it with paceline.save"
            )
        try:
            data = _read(self._inside(chunk.file), chunk.at, chunk.nbytes)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self.path}/{chunk.file} holds an object for {name}, and to unpickle objects is to run what the file "
                f"says: {str(error).splitlines()[0]} Leave it out of the state that is saved, or save plain values"
            ) from None
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointDamagedError(f"{self.path}/{chunk.file} has no readable {name}: {error}") from error

    def _inside(self, file: str) -> Path:
        """Returns the path of a file that the metadata names, which must not be outside of the directory."""
        top = Path(self.path).resolve()
        path = (top / file).resolve()
        if not path.is_relative_to(top):
            raise CheckpointError(f"{self.path}/.metadata names {file}, which is outside of the directory")
        return path


def _read(path: Path, at: int = 0, nbytes: int = -1) -> bytes:
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if at + max(nbytes, 0) > size:
                raise CheckpointDamagedError(f"{path} is cut: it ends before byte {at + nbytes:,}")
            file.seek(at)
            return file.read(nbytes)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{path} is missing") from None


@dataclass
class _Leaf:
    """Tells a dict that was saved as an object from one that the paths make."""

    value: object


def _nested(leaves: list[tuple[tuple[str | int, ...], object]]) -> object:
    """Returns nested dicts and lists, given each leaf with its path; numbers in a path are places in lists."""
    top: dict[str | int, object] = {}
    for path, leaf in leaves:
        inner: dict[str | int, object] = top
        for key in path[:-1]:
            inner = inner.setdefault(key, {})  # type: ignore[assignment]  # a leaf has no path below it
        inner[path[-1]] = _Leaf(leaf)
    return _with_lists(top)


def _with_lists(value: object) -> object:
    if isinstance(value, _Leaf):
        return value.value
    assert isinstance(value, dict)
    inner = {key: _with_lists(each) for key, each in value.items()}
    if inner and all(type(key) is int for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
