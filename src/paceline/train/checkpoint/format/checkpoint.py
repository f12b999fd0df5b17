"""Reads one checkpoint: any part of any tensor, checked against its digests on the way.

Which checkpoints a root has, in which order, and what is wrong with those that are not whole.

Writes tensors of a checkpoint as one safetensors file, which appears under its name when it is whole and durable.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format import manifest_json
from paceline.train.checkpoint.format.local_storage import LocalStorage
from paceline.train.checkpoint.format.manifest import (
    FILE,
    LATEST,
    WRITING,
    Manifest,
    Piece,
    Summary,
    TensorEntry,
    is_name,
)
from paceline.train.checkpoint.format.manifest_json import digest_of
from paceline.train.checkpoint.format.regions import Flat, Region, copies, count, whole
from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE, header_of, nbytes_of
from paceline.train.checkpoint.format.storage import (
    Hold,
    InputFile,
    OutputFile,
    ReadableStorage,
    Storage,
    check_room,
    open_storage,
    storage_error,
)

_MOST_NBYTES = 4 << 30  # of a manifest, which has some tens of bytes for each MiB of the checkpoint


@dataclass(frozen=True)
class Listing:
    """A checkpoint of a root: what its manifest says, and why it cannot be used, if it cannot."""

    name: str
    step: int | None = None
    sequence: int | None = None
    token: str | None = None
    nbytes: int = 0
    fault: str | None = None


def read_manifest(storage: ReadableStorage, directory: str) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointDamagedError: there is none, or it is cut or was changed.
        CheckpointError: it is of another version, or cannot be read.
    """
    return manifest_json.from_bytes(*_manifest_text(storage, directory))


def _manifest_text(storage: ReadableStorage, directory: str) -> tuple[bytes, str]:
    """Returns what the manifest's file holds, and the file's name for errors."""
    name = f"{directory}/{FILE}" if directory else FILE
    try:
        return read_file(storage, name), storage.describe(name)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{storage.describe(directory)} has no {FILE}: it was not finished") from None
    except OSError as error:
        raise storage_error("read", storage, name, error) from error


def read_file(storage: ReadableStorage, name: str) -> bytes:
    """Returns all that a small file holds."""
    file = storage.open(name)
    with contextlib.closing(file):
        if (nbytes := file.size()) > _MOST_NBYTES:
            raise CheckpointDamagedError(
                f"{storage.describe(name)} has {nbytes:,} bytes, too many for what it should be"
            )
        buffer = bytearray(nbytes)
        return bytes(buffer[: file.read_into(0, memoryview(buffer))])


def _fault_of_sizes(storage: Storage, directory: str, summary: Summary) -> str | None:
    """Returns which of a checkpoint's files is missing or has the wrong size; None if all are there."""
    for name, entry in summary.files_here().items():
        path = f"{directory}/{name}"
        nbytes = storage.size(path)
        if nbytes is None:
            return f"{storage.describe(path)} is missing"
        if nbytes != entry.nbytes:
            return f"{storage.describe(path)} has {nbytes:,} bytes instead of {entry.nbytes:,}"
    return None


def look_at(storage: Storage, name: str) -> Listing:
    """Returns what is known of one checkpoint; all its files are there, with their sizes, if it has no fault."""
    try:
        summary = manifest_json.summary_from_bytes(*_manifest_text(storage, name))
        fault = _fault_of_sizes(storage, name, summary)
    except (CheckpointError, OSError, KeyError) as error:
        return Listing(name, fault=str(error))
    nbytes = sum(each.nbytes for each in summary.files_here().values())
    return Listing(name, summary.step, summary.sequence, summary.token, nbytes, fault)


def listing_of(storage: Storage) -> list[Listing]:
    """Returns the checkpoints of a root: first those whose manifest cannot be read, then those that were saved last."""
    found = [look_at(storage, name) for name in storage.names() if is_name(name)]
    return sorted(found, key=lambda each: (each.sequence is None, each.sequence or 0, each.name), reverse=True)


def unfinished(storage: Storage) -> list[str]:
    """Returns the directories of saves that did not come to their end, or have not yet."""
    return sorted(name for name in storage.names() if name.startswith(WRITING))


def latest_name(storage: Storage) -> str | None:
    """Returns what the pointer `latest` names; None if there is none."""
    try:
        return read_file(storage, LATEST).decode("utf-8", "replace").strip() or None
    except (FileNotFoundError, CheckpointDamagedError):
        return None


Progress: TypeAlias = Callable[[int, int], None]

_DIRECT_NBYTES = 64 << 10  # what is read without the block around it, if nothing is to be verified


class Checkpoint:
    """An open checkpoint. Until it is closed, no save removes it.

    Attributes: `manifest`, `name` of its directory, and `nbytes_read` so far.
    """

    def __init__(self, storage: ReadableStorage, name: str) -> None:
        """Opens a checkpoint of a place; "" is the place itself.

        Raises:
            CheckpointDamagedError: it has no whole manifest.
            CheckpointError: its manifest is of another version, or cannot be read.
        """
        self.name = name
        self.nbytes_read = 0
        self._storage = storage
        self._files: dict[str, InputFile] = {}
        self._hold: Hold | None = None
        with contextlib.suppress(OSError):  # reading the manifest says why
            self._hold = storage.share(name)
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
        """Closes its files and lets saves remove it; may be called again."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def describe(self, file: str = "") -> str:
        """Returns the full path or address of the checkpoint or one of its files."""
        return self._storage.describe(self._path(file))

    def entry(self, name: str) -> TensorEntry:
        """Returns what is known of a tensor.

        Raises:
            KeyError: it has no tensor of this name.
        """
        if (entry := self.manifest.tensors.get(name)) is None:
            raise KeyError(f"{self.describe()} has no tensor {name}")
        return entry

    def read(self, name: str, region: Region | None = None, *, verify: bool = True) -> bytearray:
        """Returns a tensor's bytes, or those of a region of it; see `read_into`."""
        entry = self.entry(name)
        buffer = bytearray(count(whole(entry.shape) if region is None else region) * ITEMSIZE[entry.dtype])
        self.read_into(name, region, memoryview(buffer), verify=verify)
        return buffer

    def read_into(
        self,
        name: str,
        region: Region | None,
        buffer: bytearray | memoryview,
        *,
        verify: bool = True,
        files: Container[str] | None = None,
    ) -> None:
        """Fills a buffer with a region of a tensor, and reads no more than the blocks that have some of it.

        Args:
            name: of the tensor.
            region: of it; None is all.
            buffer: of the region's size in bytes, writable and contiguous.
            verify: whether to compare the blocks with their digests.
            files: what is in other files is left out; None for all.

        Raises:
            CheckpointDamagedError: a file is missing or cut, or has other bytes than were written.
            CheckpointError: a file cannot be read.
            KeyError: it has no tensor of this name.
            ValueError: the buffer has another size.
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
            is_wanted = files is None or piece.file in files
            parts = copies(entry.shape, piece.region, wanted) if is_wanted else []
            if parts:
                blocks = _Blocks(self, name, piece, count(piece.region) * itemsize, verify)
                for part in parts:
                    first = part.target * itemsize
                    size = part.nelements * itemsize
                    blocks.copy(part.source * itemsize, target[first : first + size])

    def read_piece(self, name: str, number: int, region: Region) -> bytearray:
        """Returns what one piece of a tensor has of a region, in ascending order; raises what `read_into` raises."""
        entry = self.entry(name)
        piece, itemsize = entry.pieces[number], ITEMSIZE[entry.dtype]
        parts = copies(entry.shape, piece.region, region)
        buffer = bytearray(sum(part.nelements for part in parts) * itemsize)
        blocks = _Blocks(self, name, piece, count(piece.region) * itemsize, verify=True)
        at, target = 0, memoryview(buffer)
        for part in parts:
            size = part.nelements * itemsize
            blocks.copy(part.source * itemsize, target[at : at + size])
            at += size
        return buffer

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Reads every byte that this directory has; returns what is wrong, with file and tensor.

        Args:
            progress: called with the bytes read and the bytes in all after each tensor.
        """
        files = self.manifest.files_here()
        unfit = {name: fault for name in files if (fault := self._fault_of_file(name)) is not None}
        faults = list(unfit.values())
        total = sum(each.nbytes for each in files.values())
        done = 0
        for name, entry in self.manifest.tensors.items():
            for piece in entry.pieces:
                if piece.file in files and piece.file not in unfit:
                    nbytes = count(piece.region) * ITEMSIZE[entry.dtype]
                    faults.extend(_Blocks(self, name, piece, nbytes, True).faults())
                    done += nbytes
            if progress is not None:
                progress(done, total)
        return faults

    def _fault_of_file(self, name: str) -> str | None:
        """Compares the size and the header of a file with the manifest."""
        entry = self.manifest.files[name]
        try:
            nbytes = self._storage.size(self._path(name))
            if nbytes is None:
                return f"{self.describe(name)} is missing"
            if nbytes != entry.nbytes:
                return f"{self.describe(name)} has {nbytes:,} bytes instead of {entry.nbytes:,}"
            header = bytearray(entry.header_nbytes)
            self.read_bytes(name, 0, memoryview(header), "its header")
        except CheckpointError as error:
            return str(error)
        if digest_of(header) != entry.header:
            return f"{self.describe(name)}: its header is not the one that was written"
        return None

    def read_bytes(self, file: str, at: int, buffer: memoryview, what: str) -> None:
        """Fills a buffer with a file's bytes; `what` they are is for the error."""
        try:
            if file not in self._files:
                self._files[file] = self._storage.open(self._path(file))
            nbytes = self._files[file].read_into(at, buffer)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{self._missing(file)}; it has {what}") from None
        except OSError as error:
            raise storage_error("read", self._storage, self._path(file), error) from error
        self.nbytes_read += nbytes
        if nbytes != len(buffer):
            raise CheckpointDamagedError(
                f"{self.describe(file)} is cut: it ends at byte {at + nbytes:,}, and the bytes up to "
                f"{at + len(buffer):,} are {what}"
            )

    def _missing(self, file: str) -> str:
        if self.manifest.here is not None and file not in self.manifest.here:
            return f"{self.describe(file)} is on another host"
        return f"{self.describe(file)} is missing"

    def _path(self, file: str) -> str:
        return "/".join(filter(None, (self.name, file)))


class _Blocks:
    """The blocks of one piece. Of those that are needed in part, the latest is kept, since reads go upwards."""

    def __init__(self, checkpoint: Checkpoint, tensor: str, piece: Piece, nbytes: int, verify: bool) -> None:
        self._checkpoint, self._tensor, self._piece = checkpoint, tensor, piece
        self._nbytes, self._verify = nbytes, verify
        self._size = checkpoint.manifest.block_nbytes
        self._kept: tuple[int, memoryview] | None = None

    def copy(self, at: int, target: memoryview) -> None:
        """Fills a buffer from byte `at` of the piece on."""
        done = 0
        while done < len(target):
            index, within = divmod(at + done, self._size)
            size = min(self._length(index) - within, len(target) - done)
            part = target[done : done + size]
            if size == self._length(index):
                self._read(index, part)
            elif not self._verify and size >= _DIRECT_NBYTES:
                self._checkpoint.read_bytes(self._piece.file, self._piece.at + at + done, part, self._what())
            else:
                part[:] = self._keep(index)[within : within + size]
            done += size

    def faults(self) -> list[str]:
        """Returns what is wrong with any of the blocks, or the first reason why they cannot be read."""
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
        at = self._piece.at + index * self._size
        self._checkpoint.read_bytes(self._piece.file, at, buffer, self._what())
        if self._verify and (index >= len(self._piece.digests) or digest_of(buffer) != self._piece.digests[index]):
            raise CheckpointDamagedError(
                f"{self._checkpoint.describe(self._piece.file)} was changed: bytes {at:,} to {at + len(buffer):,}, "
                f"{self._what()}, are not those that were written"
            )

    def _what(self) -> str:
        return f"of the tensor {self._tensor}"


def open_checkpoint(where: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint by its path or address, or the newest whole one of a root.

    Raises:
        CheckpointError: there is none; the message says what is wrong with those that are there.
    """
    storage = open_storage(where)
    if storage.size(FILE) is not None:
        return Checkpoint(storage, "")
    damaged: dict[str, str] = {}
    while True:
        listings = listing_of(storage)
        whole_one = next((each for each in listings if each.fault is None and each.name not in damaged), None)
        if whole_one is None:
            break
        try:
            return Checkpoint(storage, whole_one.name)
        except CheckpointDamagedError as error:  # or a save has just removed it, since there is a newer one
            damaged[whole_one.name] = str(error)
    known = {each.name: each.fault or damaged[each.name] for each in listings}
    faults = "; ".join(map(": ".join, known.items()))
    raise CheckpointError(f"{storage.describe()} has no whole checkpoint" + (f" ({faults})" if faults else ""))


_CHUNK_NBYTES = 64 << 20


def export(
    checkpoint: Checkpoint, names: dict[str, str], target: str | os.PathLike[str], progress: Progress | None = None
) -> int:
    """Writes tensors into one file; returns its size in bytes.

    Args:
        checkpoint: that has them.
        names: of the tensors in the checkpoint, and their names in the file.
        target: the file; one that is there is replaced when the new one is whole.
        progress: called with the bytes of tensors written and the bytes in all.

    Raises:
        CheckpointDamagedError: the checkpoint does not hold what was written.
        CheckpointError: the file could not be written.
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
            _copy(checkpoint, ascending, file, total, progress)
            file.commit()
        storage.rename(written, path.name)
        storage.sync_directory("")
    except OSError as error:
        raise storage_error("write", storage, path.name, error) from error
    finally:
        storage.remove(written)  # it is there only after an error
    return len(header) + total


def _copy(checkpoint: Checkpoint, names: list[str], file: OutputFile, total: int, progress: Progress | None) -> None:
    done = 0
    for name in names:
        for data in _chunks(checkpoint, name):
            file.write([memoryview(data)])
            done += len(data)
            if progress is not None:
                progress(done, total)


def _chunks(checkpoint: Checkpoint, name: str) -> Iterator[bytearray]:
    """Yields a tensor's bytes in parts, so that a large one needs little memory."""
    entry = checkpoint.entry(name)
    count, step = prod(entry.shape), _CHUNK_NBYTES // ITEMSIZE[entry.dtype]
    for start in range(0, count, step):
        yield checkpoint.read(name, Flat(start, min(start + step, count)))
