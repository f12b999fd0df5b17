"""Reads one checkpoint: any part of any tensor, checked against its digests on the way."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container
from typing import TypeAlias

from paceline.checkpoint.format.copies import copies
from paceline.checkpoint.format.digests import digest_of
from paceline.checkpoint.format.dtypes import ITEMSIZE
from paceline.checkpoint.format.manifest import FILE, Manifest, Piece, TensorEntry
from paceline.checkpoint.format.places import Hold, InputFile, Source, place_at
from paceline.checkpoint.format.reading import listing_of, read_manifest
from paceline.checkpoint.format.refusals import could_not
from paceline.checkpoint.format.regions import Region, count, whole
from paceline.errors import CheckpointDamagedError, CheckpointError

Progress: TypeAlias = Callable[[int, int], None]

_DIRECT_NBYTES = 64 << 10  # what is read without the block around it, if nothing is to be verified


class Checkpoint:
    """An open checkpoint. Until it is closed, no save removes it.

    Attributes: `manifest`, `name` of its directory, and `nbytes_read` so far.
    """

    def __init__(self, place: Source, name: str) -> None:
        """Opens a checkpoint of a place; "" is the place itself.

        Raises:
            CheckpointDamagedError: it has no whole manifest.
            CheckpointError: its manifest is of another version, or cannot be read.
        """
        self.name = name
        self.nbytes_read = 0
        self._place = place
        self._files: dict[str, InputFile] = {}
        self._hold: Hold | None = None
        with contextlib.suppress(OSError):  # reading the manifest says why
            self._hold = place.share(name)
        try:
            self.manifest: Manifest = read_manifest(place, name)
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
        return self._place.describe(self._path(file))

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
            nbytes = self._place.size(self._path(name))
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
                self._files[file] = self._place.open(self._path(file))
            nbytes = self._files[file].read_into(at, buffer)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{self._missing(file)}; it has {what}") from None
        except OSError as error:
            raise could_not("read", self._place, self._path(file), error) from error
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
    place = place_at(where)
    if place.size(FILE) is not None:
        return Checkpoint(place, "")
    damaged: dict[str, str] = {}
    while True:
        listings = listing_of(place)
        whole_one = next((each for each in listings if each.fault is None and each.name not in damaged), None)
        if whole_one is None:
            break
        try:
            return Checkpoint(place, whole_one.name)
        except CheckpointDamagedError as error:  # or a save has just removed it, since there is a newer one
            damaged[whole_one.name] = str(error)
    known = {each.name: each.fault or damaged[each.name] for each in listings}
    faults = "; ".join(map(": ".join, known.items()))
    raise CheckpointError(f"{place.describe()} has no whole checkpoint" + (f" ({faults})" if faults else ""))
