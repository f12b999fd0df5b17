"""write_part: writes one rank's regions to a sequence of safetensors files, with digests, and makes them durable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.manifest import (
    BLOCK_NBYTES,
    Draft,
    FileEntry,
    Piece,
    RankPart,
    TensorEntry,
    blocks_of,
    digest_of,
)
from paceline.train.checkpoint.format.regions import Flat, Region, TensorBlock, count, fault_of, whole
from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE, StoredTensor, header_of, nbytes_of
from paceline.train.checkpoint.format.storage import WritableStorage, check_room, storage_error, who

Data: TypeAlias = "bytes | bytearray | memoryview"
Progress: TypeAlias = Callable[[int, int], None]

SPLIT_NBYTES = 1 << 30
_WRITE_NBYTES = 8 * BLOCK_NBYTES  # number of bytes per write call
_SMALL_NBYTES = 64 << 10  # blocks smaller than this are copied and combined into one write
_MOST_PENDING = 256


@dataclass(frozen=True)
class WriteItem:
    """A region of a tensor that this rank writes.

    The elements in `data`, or those that the function returns, are contiguous and row-major. They must not change until
    `write_part` calls the next item's function or returns.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    data: Data | Callable[[], Data]

    @property
    def nbytes(self) -> int:
        """The region's size in bytes."""
        return count(self.region) * ITEMSIZE[self.dtype]

    @property
    def key(self) -> str:
        """The region's key in its file. The key of a whole tensor is the tensor's name."""
        if self.region == whole(self.shape) and self.name != "__metadata__":
            return self.name
        if isinstance(self.region, Flat):
            return f"{self.name}[{self.region.start}:{self.region.stop}]"
        ranges = (f"{first}:{first + size}" for first, size in zip(self.region.offset, self.region.shape, strict=True))
        return f"{self.name}[{', '.join(ranges)}]"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the region in its file."""
        if isinstance(self.region, TensorBlock):
            return self.region.shape
        return self.shape if self.region == whole(self.shape) else (count(self.region),)


class _SizedItem(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=_SizedItem)


def in_files(pieces: Sequence[P], split_nbytes: int = SPLIT_NBYTES) -> Iterator[list[P]]:
    """Yields the pieces of each file in byte order. Larger elements precede smaller ones, so that all are aligned."""
    members: list[P] = []
    nbytes = 0
    for piece in sorted(pieces, key=lambda piece: -ITEMSIZE[piece.dtype]):
        if members and nbytes + piece.nbytes > split_nbytes:
            yield members
            members, nbytes = [], 0
        members.append(piece)
        nbytes += piece.nbytes
    if members:
        yield members


def write_part(
    storage: WritableStorage,
    draft: Draft,
    rank: int,
    pieces: Sequence[WriteItem],
    *,
    split_nbytes: int = SPLIT_NBYTES,
    progress: Progress | None = None,
) -> RankPart:
    """Writes a rank's pieces, and returns when they are durable.

    The rank determines the file names. Pieces with which a file would exceed `split_nbytes` are written to a new file.
    After each chunk of at most 8 MiB, `progress` is called with the number of bytes written and the total number of
    bytes. It may raise an error to stop the write.
    """
    for piece in pieces:
        if (fault := fault_of(piece.region, piece.shape)) is not None:
            raise CheckpointError(f"{who(rank)} tried to save {fault} for {piece.name}")
    total = sum(piece.nbytes for piece in pieces)
    check_room(storage, total, rank)
    files: dict[str, FileEntry] = {}
    found: dict[str, TensorEntry] = {}
    done = 0
    for number, members in enumerate(in_files(pieces, split_nbytes)):
        name = f"rank_{rank:05d}_{number:03d}.safetensors"
        with contextlib.closing(_Stream(storage, f"{draft.directory}/{name}", rank, done, total, progress)) as stream:
            files[name] = _write_file(stream, name, members, found)
            done = stream.done
    try:
        storage.sync_directory(draft.directory)
    except OSError as error:
        raise storage_error("make durable", storage, draft.directory, error, rank=rank) from error
    return RankPart(rank, files, found)


def _write_file(stream: _Stream, name: str, pieces: list[WriteItem], found: dict[str, TensorEntry]) -> FileEntry:
    header, stored_tensors = header_of([(piece.key, piece.dtype, piece.stored_shape) for piece in pieces])
    stream.add(memoryview(header), is_data=False)
    for piece, stored in zip(pieces, stored_tensors, strict=True):
        digests = _write_piece(stream, piece, stored)
        written = Piece.of(name, piece.key, stored.offset, piece.region, digests)
        entry = found.setdefault(piece.name, TensorEntry(piece.dtype, piece.shape, ()))
        found[piece.name] = replace(entry, pieces=(*entry.pieces, written))
    stream.finish()
    nbytes = len(header) + sum(piece.nbytes for piece in pieces)
    return FileEntry(nbytes, len(header), digest_of(header))


def _write_piece(stream: _Stream, piece: WriteItem, stored: StoredTensor) -> tuple[str, ...]:
    data = piece.data() if callable(piece.data) else piece.data
    view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    if len(view) != nbytes_of(stored.dtype, stored.shape):
        raise CheckpointError(
            f"{stream.who} was given {len(view)} bytes for {piece.key}, which has {piece.nbytes} ({piece.dtype} "
            f"{list(piece.stored_shape)})"
        )
    found = []
    for chunk in blocks_of(view, _WRITE_NBYTES):
        found += [digest_of(block) for block in blocks_of(chunk)]
        stream.add(chunk)
    stream.release()
    return tuple(found)


class _Stream:
    """A file that is being written. Collects small blocks, counts bytes, and converts OSErrors to CheckpointErrors."""

    def __init__(
        self, storage: WritableStorage, name: str, rank: int, done: int, total: int, progress: Progress | None
    ) -> None:
        self.who = who(rank)
        self.done = done
        self._storage, self._name, self._rank = storage, name, rank
        self._total, self._progress = total, progress
        self._pending: list[memoryview] = []
        self._pending_nbytes = 0
        self._borrows = False  # whether any pending block is in the caller's memory
        with self._refusing("make"):
            self._file = storage.create(name)

    def close(self) -> None:
        self._file.close()

    def add(self, block: memoryview, *, is_data: bool = True) -> None:
        """Writes a block, immediately or together with later blocks. The block must not change before `release`."""
        is_small = len(block) < _SMALL_NBYTES
        self._pending.append(memoryview(bytes(block)) if is_small else block)
        self._pending_nbytes += len(block)
        self._borrows = self._borrows or not is_small
        if self._pending_nbytes >= _WRITE_NBYTES or len(self._pending) >= _MOST_PENDING:
            self._flush()
        if is_data:
            self.done += len(block)
            if self._progress is not None:
                self._progress(self.done, self._total)

    def release(self) -> None:
        """Writes pending blocks that are in the caller's memory. Small blocks, which were copied, may stay pending."""
        if self._borrows:
            self._flush()

    def finish(self) -> None:
        self._flush()
        with self._refusing("write"):
            self._file.commit()

    def _flush(self) -> None:
        views, self._pending, self._pending_nbytes, self._borrows = self._pending, [], 0, False
        with self._refusing("write"):
            self._file.write(views)

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            how_far = f"after {self.done:,} of this rank's {self._total:,} bytes" if what == "write" else ""
            raise storage_error(what, self._storage, self._name, error, rank=self._rank, progress=how_far) from error
