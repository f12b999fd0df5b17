"""The manifest of a checkpoint: its files, the tensor regions that they contain, and the plain values.

A directory is a checkpoint only if it has a readable manifest. `Draft` describes a checkpoint that is being written. A
manifest is encoded as JSON. Its last member is a digest of the preceding text, so that truncation and edits are
detected.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import xxhash

from paceline.errors import CheckpointDamagedError, CheckpointError, and_more
from paceline.train.checkpoint.format.regions import Flat, Region, TensorBlock, count, untiled
from paceline.train.checkpoint.format.regions import fault_of as fault_of_region
from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE, LONGEST_HEADER_NBYTES, is_shape, nbytes_of
from paceline.train.checkpoint.format.storage import ReadableStorage, storage_error
from paceline.train.checkpoint.format.values import Json, tensors_in

WRITING = ".writing-"
REMOVING = ".removing-"
LATEST = "latest"
_NAME = re.compile(r"(step|state)_\d+(\.\d+)?(-[0-9a-f]+)?")
VERSION = 1
FILE = "manifest.json"
_MOST_NBYTES = 4 << 30  # maximum size of a manifest; a manifest takes a few tens of bytes per MiB of the checkpoint
_LARGE_NBYTES = 64 << 20  # the end of a larger file is checked before the whole file is read
_FILE_NAME = re.compile(r"\w[\w.-]{0,254}", re.ASCII)
_LARGEST = 1 << 62
_LARGEST_SEQUENCE = 1 << 53
_MOST_SHOWN = 8  # maximum number of dimensions that a message lists
_LARGEST_BLOCK_NBYTES = 1 << 30  # a block is read into memory as a whole
_LATEST_S = 1 << 37  # the latest valid write time, in the year 6325
BLOCK_NBYTES = 1 << 20  # size of a block; each has its own digest, so partial reads of a piece can be verified


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    Attributes:
        name: the name of the published checkpoint.
        directory: the directory to which ranks write.
        step: the training step, or None.
        sequence: the checkpoint's sequence number, greater than that of any earlier checkpoint in the root.
        token: a string that is unique to the checkpoint.
    """

    name: str
    directory: str
    step: int | None
    sequence: int
    token: str

    def to_bytes(self) -> bytes:
        """Encodes the draft, which is then sent to the other ranks."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Draft:
        """Decodes a draft encoded by `to_bytes`."""
        return msgspec.json.decode(data, type=Draft)


def is_name(name: str) -> bool:
    """Returns True if a name has the format used by saves. Directories with other names are never changed."""
    return _NAME.fullmatch(name) is not None


def draft_of(
    step: int | None, sequence: int, token: str, taken: Container[str], *, renames: bool, is_unique: bool
) -> Draft:
    """Returns the draft for a new checkpoint.

    Args:
        step: the training step. If None, the name contains the sequence number instead.
        taken: the names that are already in use.
        renames: whether the checkpoint is first written under a different name.
        is_unique: whether to include the token in the name, to make the name unique across hosts.
    """
    stem = f"state_{sequence:06d}" if step is None else f"step_{step:010d}"
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}.{number}", number + 1
    if is_unique:
        name = f"{stem}-{token}"
    directory = f"{WRITING}{name}-{token}" if renames else name
    return Draft(name, directory, step, sequence, token)


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """The location of a tensor region in a file.

    Attributes:
        key: the key of the region in the safetensors file.
        at: the offset of the region's first byte in the file, in bytes.
        digests: the digests of the region's blocks.
        flat: the start and stop of a `Flat` region, or None.
        offset: the offset of a `TensorBlock`, or None.
        shape: the shape of a `TensorBlock`, or None.
    """

    file: str
    key: str
    at: int
    digests: tuple[str, ...]
    flat: tuple[int, int] | None = None
    offset: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    @staticmethod
    def of(file: str, key: str, at: int, region: Region, digests: tuple[str, ...]) -> Piece:
        """Returns the piece that contains a given region."""
        if isinstance(region, Flat):
            return Piece(file, key, at, digests, flat=(region.start, region.stop))
        return Piece(file, key, at, digests, offset=region.offset, shape=region.shape)

    def __post_init__(self) -> None:
        if self.flat is None and (self.offset is None or self.shape is None):
            raise ValueError(f"the piece {self.key} has neither `flat` nor `offset` and `shape`")

    @property
    def region(self) -> Region:
        """The region of the tensor."""
        if self.flat is not None:
            return Flat(*self.flat)
        assert self.offset is not None and self.shape is not None
        return TensorBlock(self.offset, self.shape)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: the safetensors name of its dtype, its shape, and the pieces that it consists of."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class FileEntry:
    """A file: its size, and the size and digest of the header that precedes the pieces. Sizes are in bytes."""

    nbytes: int
    header_nbytes: int
    header: str


@dataclass(frozen=True)
class RankPart:
    """The files and pieces that one rank wrote."""

    rank: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class Summary:
    """The fields of a `Manifest` that are needed to list checkpoints."""

    step: int | None
    sequence: int
    token: str
    files: dict[str, FileEntry]
    here: tuple[str, ...] | None = None

    def files_here(self) -> dict[str, FileEntry]:
        """Returns the files that this directory must contain."""
        return self.files if self.here is None else {name: self.files[name] for name in self.here}


@dataclass(frozen=True, kw_only=True)
class Manifest(Summary):
    """The description of a checkpoint.

    Attributes:
        step: the training step, or None.
        sequence: the sequence number, which increases with each checkpoint in a root.
        token: a string that is unique to the checkpoint and the same on all hosts.
        files: the files, by name.
        here: the names of the files in this directory, or None if it contains all files.
        world_size: the number of ranks that wrote the checkpoint.
        written_at_s: the time of writing, in seconds since the Unix epoch.
        paceline: the version of Paceline that wrote the checkpoint.
        tensors: the tensors, by name.
        values: the plain values, as a JSON tree.
        block_nbytes: the number of bytes that each digest of a piece covers.
    """

    world_size: int
    written_at_s: float
    paceline: str
    tensors: dict[str, TensorEntry]
    values: Json
    block_nbytes: int = BLOCK_NBYTES


def merged(parts: Iterable[RankPart]) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Merges the files and tensors of all ranks, whose pieces must cover each tensor exactly once."""
    files: dict[str, FileEntry] = {}
    first: dict[str, tuple[int, TensorEntry]] = {}
    pieces: dict[str, list[Piece]] = {}
    for part in parts:
        files.update(part.files)
        for name, entry in part.tensors.items():
            rank, known = first.setdefault(name, (part.rank, entry))
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"the tensor {name} is {known.dtype} {list(known.shape)} on rank {rank}, but {entry.dtype} "
                    f"{list(entry.shape)} on rank {part.rank}; all ranks must save the same state"
                )
            pieces.setdefault(name, []).extend(entry.pieces)
    tensors = {
        name: TensorEntry(entry.dtype, entry.shape, tuple(pieces[name])) for name, (_, entry) in sorted(first.items())
    }
    for name, entry in tensors.items():
        if (fault := untiled(entry.shape, [piece.region for piece in entry.pieces])) is not None:
            raise CheckpointError(
                f"the ranks do not hold the tensor {name} ({entry.dtype} {list(entry.shape)}) exactly once: {fault}. "
                "Every rank must save its part of the same state"
            )
    return files, tensors


def fault_of(manifest: Manifest) -> str | None:
    """Returns the first inconsistency found in a manifest, or None. The manifest may have been edited."""
    if (fault := fault_of_summary(manifest)) is not None:
        return fault
    is_block = 1 <= manifest.block_nbytes <= _LARGEST_BLOCK_NBYTES
    if not is_block or manifest.world_size < 1 or not 0 <= manifest.written_at_s < _LATEST_S:
        return "a size or the time is invalid"
    used: dict[str, list[tuple[int, int]]] = {name: [(0, file.header_nbytes)] for name, file in manifest.files.items()}
    for name, entry in manifest.tensors.items():
        if (fault := _fault_of_tensor(entry, manifest, used)) is not None:
            return f"of the tensor {name} {fault}"
    for name, ranges in used.items():
        ends = [stop for _, stop in sorted(ranges)]
        starts = [start for start, _ in sorted(ranges)]
        if any(start < end for start, end in zip(starts[1:], ends, strict=False)):
            return f"two tensors, or a tensor and the header, have the same bytes of {name}"
    if missing := sorted(tensors_in(manifest.values) - manifest.tensors.keys()):
        return f"a value refers to the tensor {missing[0]}, which is not listed"
    return None


def fault_of_summary(summary: Summary) -> str | None:
    """Returns the first fault found in a manifest's numbers and file names, or None."""
    for name, entry in summary.files.items():
        if not _FILE_NAME.fullmatch(name) or name == FILE:
            return f"{name!r} is not the name of a file in its directory"
        if not 0 <= entry.header_nbytes <= min(entry.nbytes, LONGEST_HEADER_NBYTES) or entry.nbytes > _LARGEST:
            return f"{name} has {entry.nbytes:,} bytes, {entry.header_nbytes:,} of them as its header"
    if not 0 <= summary.sequence <= _LARGEST_SEQUENCE:
        return f"its sequence is {summary.sequence}"
    unlisted = [name for name in summary.here or () if name not in summary.files]
    return f"{unlisted[0]} is listed as local, but is not among the files" if unlisted else None


def _fault_of_tensor(entry: TensorEntry, manifest: Manifest, used: dict[str, list[tuple[int, int]]]) -> str | None:
    """Returns a fault in the pieces of a tensor, or None; adds the pieces' byte ranges to `used`, by file."""
    if entry.dtype not in ITEMSIZE:
        return f"the type {entry.dtype} is unknown"
    if not is_shape(entry.shape) or nbytes_of(entry.dtype, entry.shape) > _LARGEST:
        return f"the shape [{and_more(entry.shape, _MOST_SHOWN)}] is invalid"
    for piece in entry.pieces:
        if piece.file not in manifest.files:
            return f"a piece is in {piece.file}, which is not listed"
        if (fault := fault_of_region(piece.region, entry.shape)) is not None:
            return f"a piece has {fault}"
        nbytes, file = count(piece.region) * ITEMSIZE[entry.dtype], manifest.files[piece.file]
        if not 0 <= piece.at <= piece.at + nbytes <= file.nbytes:
            return f"the bytes {piece.at} to {piece.at + nbytes} of {piece.file} are listed, but it has {file.nbytes}"
        if len(piece.digests) != max(-(-nbytes // manifest.block_nbytes), 1):
            return f"a piece of {nbytes} bytes has {len(piece.digests)} digests"
        if nbytes:
            used[piece.file].append((piece.at, piece.at + nbytes))
    return untiled(entry.shape, [piece.region for piece in entry.pieces])


DIGEST_NAME = "xxh3_128"
_FORMAT = "paceline-checkpoint"
_DIGEST = b',\n "digest": "'
_END = b'"\n}\n'
T = TypeVar("T")


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Returns the digest of `data` as a hexadecimal string.

    Digests (XXH3, 128 bits) detect accidental damage, not attacks. Computing them takes about as long as reading the
    memory. A cryptographic digest would take several times as long but would not protect better, because a program that
    can change a file can also change the manifest.
    """
    return xxhash.xxh3_128_hexdigest(data)


def blocks_of(data: memoryview, block_nbytes: int = BLOCK_NBYTES) -> Iterator[memoryview]:
    """Yields the blocks of a piece, each of which has its own digest. An empty piece has one empty block."""
    for start in range(0, max(len(data), 1), block_nbytes):
        yield data[start : start + block_nbytes]


@dataclass
class _Kind:
    """The members that identify a manifest in every version of the format."""

    format: str
    version: int
    digests: str = ""


@dataclass
class _Contribution:
    part: RankPart
    values: Mapping[str, Json]


def contribution_to_bytes(part: RankPart, values: Mapping[str, Json]) -> bytes:
    """Encodes a rank's part and its plain values for the rank that writes the manifest."""
    return msgspec.json.encode(_Contribution(part, values))


def join_contributions(contributions: Sequence[bytes]) -> bytes:
    """Joins the contributions of all ranks, in rank order."""
    return b"[" + b",".join(contributions) + b"]"


def contributions_from_bytes(data: bytes) -> tuple[list[RankPart], dict[str, Json]]:
    """Decodes joined contributions into the ranks' parts and the values.

    If several ranks have a value with the same name, the lowest rank's value is used.
    """
    contributions = msgspec.json.decode(data, type=list[_Contribution])
    values: dict[str, Json] = {}
    for contribution in reversed(contributions):
        values |= contribution.values
    return [contribution.part for contribution in contributions], values


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """Encodes a manifest, with one line for each tensor and file."""
    head: dict[str, object] = {
        "format": _FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "token": manifest.token,
        "world_size": manifest.world_size,
        "written_at_s": manifest.written_at_s,
        "paceline": manifest.paceline,
        "block_nbytes": manifest.block_nbytes,
        "digests": DIGEST_NAME,
        "here": manifest.here,
    }
    members = [_member(name, msgspec.json.encode(value)) for name, value in head.items()]
    members += [_member("files", _lines(manifest.files)), _member("tensors", _lines(manifest.tensors))]
    members.append(_member("values", msgspec.json.encode(manifest.values)))
    text = b"{\n" + b",\n".join(members)
    return text + _DIGEST + digest_of(text).encode() + _END


def manifest_from_bytes(data: bytes, where: str) -> Manifest:
    """Decodes and checks a manifest encoded by `manifest_to_bytes`, from the file `where`.

    Raises:
        CheckpointDamagedError: the manifest is truncated, changed or inconsistent.
        CheckpointError: the data is not a manifest, or has an unsupported version.
    """

    def decode() -> Manifest:
        manifest = msgspec.json.decode(data, type=Manifest)
        tensors_in(manifest.values)  # raises RecursionError here if values are nested too deeply
        return manifest

    return _sound(_read(data, where, decode), where, fault_of)


def _sound(read: T, where: str, fault_of: Callable[[T], str | None]) -> T:
    if (fault := fault_of(read)) is not None:
        raise CheckpointDamagedError(f"{where} is inconsistent: {fault}")
    return read


def _read(data: bytes, where: str, decode: Callable[[], T]) -> T:
    """Checks the digest, format and version of a manifest, and returns the result of `decode`."""
    text, separator, rest = data.rpartition(_DIGEST)
    is_intact = bool(separator) and rest == digest_of(text).encode() + _END
    try:
        kind = msgspec.json.decode(data, type=_Kind)
        if kind.format != _FORMAT:
            raise CheckpointError(f"{where} is not a manifest of Paceline: its format is {kind.format!r}")
        if kind.version != VERSION:
            raise CheckpointError(
                f"{where} has version {kind.version} of the format; this Paceline reads version {VERSION}. Read it "
                "with the version that wrote it, or a later one"
            )
        if not is_intact:
            raise CheckpointDamagedError(f"{where} was changed: its text does not match the digest at its end")
        if kind.digests != DIGEST_NAME:
            raise ValueError(f"its digests are {kind.digests!r}; this version knows {DIGEST_NAME!r}")
        return decode()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if not is_intact:
            seen = f"is truncated or was changed: {error}" if data else "is empty"
            raise CheckpointDamagedError(f"{where} {seen}") from None
        raise CheckpointError(f"{where} is not a manifest of Paceline: {error}") from None


def _member(name: str, value: bytes) -> bytes:
    return b" " + msgspec.json.encode(name) + b": " + value


def _lines(members: Mapping[str, object]) -> bytes:
    if not members:
        return b"{}"
    lines = (b" " + _member(name, msgspec.json.encode(value)) for name, value in members.items())
    return b"{\n" + b",\n".join(lines) + b"\n }"


def read_manifest(storage: ReadableStorage, directory: str) -> Manifest:
    """Returns the manifest of a checkpoint; raises the same errors as `manifest_from_bytes`."""
    return manifest_from_bytes(*_text_of(storage, directory))


def read_summary(storage: ReadableStorage, directory: str) -> Summary:
    """Returns a manifest's summary. Skips the tensors, which may be many; raises the errors of `read_manifest`."""
    data, where = _text_of(storage, directory)
    return _sound(_read(data, where, lambda: msgspec.json.decode(data, type=Summary)), where, fault_of_summary)


def _text_of(storage: ReadableStorage, directory: str) -> tuple[bytes, str]:
    name = f"{directory}/{FILE}" if directory else FILE
    try:
        return read_file(storage, name, _MOST_NBYTES, end=_END), storage.describe(name)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{storage.describe(directory)} has no {FILE}: it was not finished") from None
    except OSError as error:
        raise storage_error("read", storage, name, error) from error


def read_file(storage: ReadableStorage, name: str, most_nbytes: int, *, end: bytes = b"") -> bytes:
    """Returns the content of a file that fits into memory and has at most `most_nbytes` bytes.

    If the file is large, checks first that it ends with `end`, as a complete file does.
    """
    file = storage.open(name)
    with contextlib.closing(file):
        if (nbytes := file.size()) > most_nbytes:
            raise CheckpointDamagedError(
                f"{storage.describe(name)} has {nbytes:,} bytes, which is more than it can have"
            )
        found = bytearray(len(end))
        if nbytes > _LARGE_NBYTES and file.read_into(nbytes - len(end), memoryview(found)) and found != end:
            raise CheckpointDamagedError(f"{storage.describe(name)} is truncated or was changed: it has no digest")
        try:
            buffer = bytearray(nbytes)
            return bytes(buffer[: file.read_into(0, memoryview(buffer))])
        except MemoryError:
            raise CheckpointDamagedError(
                f"{storage.describe(name)} has {nbytes:,} bytes, which is more than memory can hold"
            ) from None
