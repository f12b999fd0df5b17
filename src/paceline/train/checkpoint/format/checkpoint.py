"""Checkpoint: reads any region of any tensor in a checkpoint, and verifies the digests.

`export` writes tensors from a checkpoint as one safetensors file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Container, Iterator
from itertools import chain
from math import prod
from pathlib import Path
from typing import TypeAlias

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format.local_storage import LocalStorage
from paceline.train.checkpoint.format.manifest import (
    Manifest,
    Piece,
    TensorEntry,
    digest_of,
    read_manifest,
)
from paceline.train.checkpoint.format.regions import Flat, Region, copies, count, count_common, whole
from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE, header_of, nbytes_of
from paceline.train.checkpoint.format.storage import (
    InputFile,
    ReadableStorage,
    SharedLock,
    check_room,
    fault_of_size,
    storage_error,
)

_CHUNK_NBYTES = 64 << 20  # number of bytes that are exported at a time
Progress: TypeAlias = Callable[[int, int], None]


class Checkpoint:
    """An open checkpoint, which is protected from removal until it is closed.

    The name "" denotes the storage itself. `nbytes_read` is the number of bytes read so far.
    """

    def __init__(self, storage: ReadableStorage, name: str) -> None:
        self.name = name
        self.nbytes_read = 0
        self._storage = storage
        self._files: dict[str, InputFile] = {}
        self._lock: SharedLock | None = None
        with contextlib.suppress(OSError):  # reading the manifest will raise this error
            self._lock = storage.share(name)
        try:
            self.manifest: Manifest = read_manifest(storage, name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files and allows saves to remove the checkpoint. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def describe(self, file: str = "") -> str:
        """Returns the full path or address of the checkpoint or of one of its files."""
        return self._storage.describe(self._path(file))

    def entry(self, name: str) -> TensorEntry:
        """Returns the entry of a tensor; raises KeyError if the checkpoint does not have it."""
        if (entry := self.manifest.tensors.get(name)) is None:
            raise KeyError(f"{self.describe()} has no tensor {name}")
        return entry

    def read(self, name: str, region: Region | None = None) -> bytearray:
        """Returns the bytes of a tensor, or of a region of it; see `read_into`."""
        entry = self.entry(name)
        buffer = bytearray(count(whole(entry.shape) if region is None else region) * ITEMSIZE[entry.dtype])
        self.read_into(name, region, memoryview(buffer))
        return buffer

    def read_into(
        self,
        name: str,
        region: Region | None,
        buffer: bytearray | memoryview,
        *,
        files: Container[str] | None = None,
    ) -> None:
        """Fills a buffer with a region of a tensor. Reads only the blocks that contain elements of the region.

        Args:
            region: the region, or None for the whole tensor.
            buffer: the destination, which must be writable, contiguous and as large as the region.
            files: the files to read, or None for all files. Elements in other files are skipped.

        Raises:
            CheckpointDamagedError: a file is missing, truncated or changed.
            CheckpointError: a file cannot be read.
        """
        entry = self.entry(name)
        wanted = whole(entry.shape) if region is None else region
        itemsize = ITEMSIZE[entry.dtype]
        target = memoryview(buffer)
        target = target.cast("B") if target.nbytes else memoryview(bytearray())
        if len(target) != count(wanted) * itemsize:
            raise ValueError(
                f"the buffer has {len(target)} bytes, and {wanted} of {name} has {count(wanted) * itemsize}"
            )
        for piece in entry.pieces:
            if files is None or piece.file in files:
                blocks = _Blocks(self, name, piece, count(piece.region) * itemsize)
                for part in copies(entry.shape, piece.region, wanted):
                    first = part.target * itemsize
                    size = part.nelements * itemsize
                    blocks.copy(part.source * itemsize, target[first : first + size])

    def read_piece(self, name: str, number: int, region: Region) -> bytearray:
        """Returns the elements of a region within one piece of a tensor; raises the same errors as `read_into`."""
        entry = self.entry(name)
        piece, itemsize = entry.pieces[number], ITEMSIZE[entry.dtype]
        buffer = bytearray(count_common(entry.shape, piece.region, region) * itemsize)
        blocks = _Blocks(self, name, piece, count(piece.region) * itemsize)
        offset, target = 0, memoryview(buffer)
        for part in copies(entry.shape, piece.region, region):
            size = part.nelements * itemsize
            blocks.copy(part.source * itemsize, target[offset : offset + size])
            offset += size
        return buffer

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Reads all files in this directory; returns all faults, each with its file and tensor.

        After each tensor, `progress` is called with the number of bytes read and the total number of bytes.
        """
        files = self.manifest.files_here()
        unfit = {name: fault for name in files if (fault := self._fault_of_file(name)) is not None}
        faults = list(unfit.values())
        total = sum(file.nbytes for file in files.values())
        done = 0
        for name, entry in self.manifest.tensors.items():
            for piece in entry.pieces:
                if piece.file in files and piece.file not in unfit:
                    nbytes = count(piece.region) * ITEMSIZE[entry.dtype]
                    faults.extend(_Blocks(self, name, piece, nbytes).faults())
                    done += nbytes
            if progress is not None:
                progress(done, total)
        return faults

    def _fault_of_file(self, name: str) -> str | None:
        entry = self.manifest.files[name]
        try:
            if (fault := fault_of_size(self._storage, self._path(name), entry.nbytes)) is not None:
                return fault
            header = bytearray(entry.header_nbytes)
            self.read_bytes(name, 0, memoryview(header), "its header")
        except CheckpointError as error:
            return str(error)
        if digest_of(header) != entry.header:
            return f"{self.describe(name)}: its header is not the one that was written"
        return None

    def read_bytes(self, file: str, offset: int, buffer: memoryview, what: str) -> None:
        """Fills a buffer with bytes from a file; error messages describe the bytes as `what`."""
        try:
            if file not in self._files:
                self._files[file] = self._storage.open(self._path(file))
            nbytes = self._files[file].read_into(offset, buffer)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{self._missing(file)}; it has {what}") from None
        except OSError as error:
            raise storage_error("read", self._storage, self._path(file), error) from error
        self.nbytes_read += nbytes
        if nbytes != len(buffer):
            raise CheckpointDamagedError(
                f"{self.describe(file)} is truncated: it ends at byte {offset + nbytes:,}, and the bytes up to "
                f"{offset + len(buffer):,} are {what}"
            )

    def _missing(self, file: str) -> str:
        if self.manifest.here is not None and file not in self.manifest.here:
            return f"{self.describe(file)} is on another host"
        return f"{self.describe(file)} is missing"

    def _path(self, file: str) -> str:
        return "/".join(filter(None, (self.name, file)))


class _Blocks:
    """Reads the blocks of one piece in order. Caches a block if only a part of it is needed."""

    def __init__(self, checkpoint: Checkpoint, tensor: str, piece: Piece, nbytes: int) -> None:
        self._checkpoint, self._piece = checkpoint, piece
        self._what = f"of the tensor {tensor}"
        self._nbytes = nbytes
        self._size = checkpoint.manifest.block_nbytes
        self._kept: tuple[int, memoryview] | None = None

    def copy(self, offset: int, target: memoryview) -> None:
        """Fills a buffer with bytes from the piece, beginning at an offset."""
        done = 0
        while done < len(target):
            index, within = divmod(offset + done, self._size)
            size = min(self._length(index) - within, len(target) - done)
            part = target[done : done + size]
            if size == self._length(index):
                self._read(index, part)
            else:
                part[:] = self._keep(index)[within : within + size]
            done += size

    def faults(self) -> list[str]:
        found: list[str] = []
        for index in range(max(-(-self._nbytes // self._size), 1)):
            try:
                self._keep(index)
            except CheckpointDamagedError as error:
                found.append(str(error))
            except CheckpointError as error:
                return [*found, str(error)]
        return found

    def _length(self, index: int) -> int:
        return min(self._size, self._nbytes - index * self._size)

    def _keep(self, index: int) -> memoryview:
        if self._kept is None or self._kept[0] != index:
            block = memoryview(bytearray(self._length(index)))
            self._read(index, block)
            self._kept = index, block
        return self._kept[1]

    def _read(self, index: int, buffer: memoryview) -> None:
        offset = self._piece.at + index * self._size
        self._checkpoint.read_bytes(self._piece.file, offset, buffer, self._what)
        if index >= len(self._piece.digests) or digest_of(buffer) != self._piece.digests[index]:
            raise CheckpointDamagedError(
                f"{self._checkpoint.describe(self._piece.file)} was changed: bytes {offset:,} to "
                f"{offset + len(buffer):,}, {self._what}, are not those that were written"
            )


def export(
    checkpoint: Checkpoint, names: dict[str, str], target: str | os.PathLike[str], progress: Progress | None = None
) -> int:
    """Writes tensors to a safetensors file, which becomes visible when complete and durable; returns its size in bytes.

    `names` maps the tensors' names in the checkpoint to their names in the file. An existing file at `target` is
    replaced. `progress` is called with the number of bytes written and the total size of the tensors in bytes.
    """
    path = Path(target)
    storage = LocalStorage(path.parent)
    entries = checkpoint.manifest.tensors
    ascending = sorted(names, key=lambda name: (-ITEMSIZE[entries[name].dtype], names[name]))
    header, _ = header_of([(names[name], entries[name].dtype, entries[name].shape) for name in ascending])
    total = sum(nbytes_of(entries[name].dtype, entries[name].shape) for name in ascending)
    check_room(storage, len(header) + total)
    written = f".{path.name}.{secrets.token_hex(4)}"
    try:
        storage.make_directory("")
        with contextlib.closing(storage.create(written)) as file:
            file.write([memoryview(header)])
            done = 0
            for data in chain.from_iterable(_chunks(checkpoint, name) for name in ascending):
                file.write([memoryview(data)])
                done += len(data)
                if progress is not None:
                    progress(done, total)
            file.commit()
        storage.rename(written, path.name)
        storage.sync_directory("")
    except OSError as error:
        raise storage_error("write", storage, path.name, error) from error
    finally:
        storage.remove(written)  # the temporary file still exists only after an error
    return len(header) + total


def _chunks(checkpoint: Checkpoint, name: str) -> Iterator[bytearray]:
    """Yields the bytes of a tensor in chunks, to limit the memory required for large tensors."""
    entry = checkpoint.entry(name)
    total, step = prod(entry.shape), _CHUNK_NBYTES // ITEMSIZE[entry.dtype]
    for start in range(0, total, step):
        yield checkpoint.read(name, Flat(start, min(start + step, total)))
