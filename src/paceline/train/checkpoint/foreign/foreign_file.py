"""Reads safetensors files and files written by torch.save. The format is recognized from the content.

A `ForeignCheckpoint` is a tree of plain values with references to tensors, which are read on demand. Reading a file
written by torch.save does not run code from its pickle.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import TypeAlias

import torch

from paceline.comm.security.untrusted_peers import encodable
from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.foreign.dcp import DcpDirectory
from paceline.train.checkpoint.foreign.record_unpickler import reason_of, require_sound_torch_file
from paceline.train.checkpoint.format.local_storage import open_regular
from paceline.train.checkpoint.format.safetensors_header import StoredTensor, length_of, read_header
from paceline.train.checkpoint.format.values import TensorRef, escaped
from paceline.train.checkpoint.pytree import CircularTreeError, TensorInfo, infos_of, put_together, take_apart, type_of

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"  # first byte of files written by torch.save before torch 1.6, and of some safetensors files


def state_of(foreign: ForeignCheckpoint) -> object:
    """Returns the saved state with its tensors, as torch.load would."""
    return put_together(foreign.tree, foreign.read)


def open_foreign(path: str | os.PathLike[str]) -> ForeignCheckpoint | None:
    """Opens a checkpoint from another library; returns None for a directory that is not such a checkpoint.

    Raises CheckpointError if the format is unknown, the file is damaged, or it contains a pickle that would have to be
    trusted.
    """
    where = Path(path)
    if where.is_dir():
        if not os.path.lexists(where / ".metadata"):
            return None
        return DcpDirectory(where)
    with open(open_regular(where, follows=True), "rb") as file:
        beginning = file.read(8)
    if beginning.startswith(_ZIP):
        return TorchFile(where)
    try:
        length_of(beginning)
    except ValueError:
        if beginning.startswith(_PICKLE):  # a safetensors file whose header has 128 bytes also begins with this byte
            return TorchFile(where)
        raise CheckpointError(
            f"{where} is neither a Paceline checkpoint nor a torch.save or safetensors file: it begins with "
            f"{beginning!r}"
        ) from None
    return SafetensorsFile(where)


class SafetensorsFile:
    """A safetensors file. Tensors are mapped into memory, so each process reads only the tensors that it uses."""

    kind = "a safetensors file"

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._stored = {escaped(stored.key): stored for stored in _tensors_of(path)}
        self.tree = {stored.key: TensorRef(name) for name, stored in self._stored.items()}
        self.tensors = {name: TensorInfo(type_of(stored.dtype), stored.shape) for name, stored in self._stored.items()}

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU. The tensor is mapped from the file if it is aligned, and copied otherwise."""
        stored = self._stored[name]
        dtype = self.tensors[name].dtype
        if stored.nbytes == 0:
            return torch.empty(stored.shape, dtype=dtype, device="cpu")
        try:
            mapped = torch.from_file(self.path, shared=False, size=stored.offset + stored.nbytes, dtype=torch.uint8)
        except (RuntimeError, UnicodeEncodeError) as error:
            raise CheckpointError(f"{self.path} cannot be mapped into memory: {error}") from None
        found = mapped[stored.offset :]
        if stored.offset % dtype.itemsize:  # other programs may write files with unaligned tensors
            found = found.clone()
        return found.view(dtype).view(stored.shape)


def _tensors_of(path: Path) -> list[StoredTensor]:
    try:
        with open(open_regular(path, follows=True), "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            beginning = file.read(8)
            length = length_of(beginning)
            if length > nbytes:
                raise ValueError(f"its header has {length:,} bytes, but the file has {nbytes:,}")
            header = beginning + file.read(length - len(beginning))
        tensors = read_header(header)
    except ValueError as error:
        raise CheckpointDamagedError(f"{path} cannot be read as a safetensors file: {error}") from None
    end = max((stored.offset + stored.nbytes for stored in tensors), default=len(header))
    if end > nbytes:
        raise CheckpointDamagedError(f"{path} is truncated: it has {nbytes:,} bytes, but its tensors end at {end:,}")
    if end < nbytes:
        raise CheckpointDamagedError(f"{path} has {nbytes:,} bytes, but its tensors end at {end:,}")
    return tensors


class TorchFile:
    """A file written by torch.save. Its tensors are mapped into memory if its format allows that."""

    kind = "a torch.save file"

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._tensors: dict[str, torch.Tensor] = {}
        try:
            self.tree = take_apart("", _load(path), self._tensors)
        except (RecursionError, CircularTreeError):
            raise CheckpointDamagedError(
                f"{path} is nested too deeply, or contains an object that contains itself"
            ) from None
        except TypeError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        self.tensors = infos_of(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU."""
        return self._tensors[name].detach()


ForeignCheckpoint: TypeAlias = SafetensorsFile | TorchFile | DcpDirectory
"""A state saved by another library.

Attributes:
    path: the path of the checkpoint.
    kind: the kind of checkpoint, for error messages.
    tree: the state as nested dicts, lists and tuples of plain values, with a `TensorRef` for each tensor.
    tensors: the dtypes and shapes of the tensors, by name.
    read: a method that returns a tensor on the CPU. The tensor may be mapped from the file, so it must not be modified.
"""


def _load(path: Path) -> object:
    try:
        return _load_mapped(path)
    except pickle.UnpicklingError as error:
        reason = reason_of(error)
        raise CheckpointError(
            f"{path} contains more than tensors and plain values, and unpickling objects can run any code that the "
            f"file specifies: {reason}. Save state_dicts; or, if you trust the file, convert it by "
            f"`torch.save(torch.load({str(path)!r}, weights_only=False)['model'].state_dict(), 'new.pt')` or the like"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # loading a damaged pickle can raise any exception
        raise CheckpointDamagedError(f"{path} cannot be read as a torch.save file: {error}") from error


def _load_mapped(path: Path) -> object:
    """Loads a file, and maps it into memory if possible. The format used before torch 1.6 does not allow mapping."""
    with open(open_regular(path, follows=True), "rb") as file:
        is_zip = require_sound_torch_file(file, str(path))
    is_mapped = is_zip and encodable(str(path)) == str(path)  # torch cannot map a file whose path is not UTF-8
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
