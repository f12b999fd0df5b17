"""Encodes manifests as JSON whose last member is the digest of the text before it, which detects cuts and edits.

Digests (XXH3 with 128 bits) detect accidents, not attacks, and cost about as much as reading the memory. A
cryptographic digest would cost several times as much and protect no better, because whoever can change a file can
change the manifest beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import xxhash

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format.manifest import (
    BLOCK_NBYTES,
    VERSION,
    FileEntry,
    Manifest,
    Piece,
    RankPart,
    Summary,
    TensorEntry,
    fault_of,
    fault_of_summary,
)
from paceline.train.checkpoint.format.regions import Box, Flat, Region
from paceline.train.checkpoint.format.values import Json, tensors_in

DIGEST_NAME = "xxh3_128"


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Returns the digest of bytes as hexadecimal text."""
    return xxhash.xxh3_128_hexdigest(data)


def blocks_of(data: memoryview, block_nbytes: int = BLOCK_NBYTES) -> Iterator[memoryview]:
    """Yields the blocks of a piece's bytes that have digests; one empty block for a piece without bytes."""
    for start in range(0, max(len(data), 1), block_nbytes):
        yield data[start : start + block_nbytes]


T = TypeVar("T")

_FORMAT = "paceline-checkpoint"
_DIGEST = b',\n "digest": "'
_END = b'"\n}\n'


@dataclass
class _Piece:
    """A piece in JSON, with either `flat`, or `offset` and `shape`."""

    file: str
    key: str
    at: int
    digests: tuple[str, ...]
    flat: tuple[int, int] | None = None
    offset: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None


@dataclass
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    pieces: list[_Piece]


@dataclass
class _Part:
    rank: int
    files: dict[str, FileEntry]
    tensors: dict[str, _Tensor]


@dataclass
class _Manifest:
    step: int | None
    sequence: int
    token: str
    world_size: int
    written_at_s: float
    paceline: str
    block_nbytes: int
    digests: str
    here: tuple[str, ...] | None
    files: dict[str, FileEntry]
    tensors: dict[str, _Tensor]
    values: msgspec.Raw


@dataclass
class _Kind:
    """The members by which every version recognizes a manifest."""

    format: str
    version: int


def part_to_bytes(part: RankPart) -> bytes:
    """Encodes the part that a rank wrote, for the rank that writes the manifest."""
    return msgspec.json.encode(_Part(part.rank, part.files, _tensors_out(part.tensors)))


def part_from_bytes(data: bytes) -> RankPart:
    """Decodes a part; the inverse of `part_to_bytes`."""
    return _part_in(msgspec.json.decode(data, type=_Part))


def _part_in(part: _Part) -> RankPart:
    return RankPart(part.rank, part.files, _tensors_in(part.tensors))


@dataclass
class _Contribution:
    part: _Part
    values: dict[str, object]


def contribution_to_bytes(part: RankPart, values: Mapping[str, Json]) -> bytes:
    """Encodes the part that a rank wrote and its plain values, for the rank that writes the manifest."""
    return msgspec.json.encode({"part": msgspec.Raw(part_to_bytes(part)), "values": values})


def join_contributions(contributions: Sequence[bytes]) -> bytes:
    """Joins the contributions of all ranks, in their order."""
    return b"[" + b",".join(contributions) + b"]"


def contributions_from_bytes(data: bytes) -> tuple[list[RankPart], dict[str, Json]]:
    """Decodes joined contributions into the ranks' parts and all values; the lowest rank's counts for each name."""
    contributions = msgspec.json.decode(data, type=list[_Contribution])
    values: dict[str, Any] = {}
    for contribution in reversed(contributions):
        values |= contribution.values
    return [_part_in(contribution.part) for contribution in contributions], values


def to_bytes(manifest: Manifest) -> bytes:
    """Returns the text of a manifest, with a line for each tensor and file."""
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
    members = [_member(name, _encode(value)) for name, value in head.items()]
    members.append(_member("files", _lines({name: _encode(file) for name, file in manifest.files.items()})))
    tensors = _tensors_out(manifest.tensors)
    members.append(_member("tensors", _lines({name: _encode(tensor) for name, tensor in tensors.items()})))
    members.append(_member("values", _encode(manifest.values)))
    text = b"{\n" + b",\n".join(members)
    return text + _DIGEST + digest_of(text).encode() + _END


def from_bytes(data: bytes, where: str) -> Manifest:
    """Decodes and checks a manifest; the inverse of `to_bytes`.

    Args:
        data: the text.
        where: the file's name, for errors.

    Raises:
        CheckpointDamagedError: the text is cut or was changed.
        CheckpointError: the text is no manifest, or one of a newer version.
    """
    manifest = _read(data, where, lambda: _manifest_in(msgspec.json.decode(data, type=_Manifest)))
    return _sound(manifest, where, fault_of)


def summary_from_bytes(data: bytes, where: str) -> Summary:
    """Decodes the members of a manifest that a list of checkpoints needs; skips the tensors, which may be many.

    Raises:
        CheckpointDamagedError, CheckpointError: as for `from_bytes`.
    """
    return _sound(_read(data, where, lambda: msgspec.json.decode(data, type=Summary)), where, fault_of_summary)


def _sound(read: T, where: str, fault_of: Callable[[T], str | None]) -> T:
    if (fault := fault_of(read)) is not None:
        raise CheckpointDamagedError(f"{where} contradicts itself: {fault}")
    return read


def _read(data: bytes, where: str, decode: Callable[[], T]) -> T:
    """Checks the digest, the format and the version, and returns the result of `decode`."""
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
            raise CheckpointDamagedError(f"{where} was changed: its text does not have the digest at its end")
        return decode()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if not is_intact:
            seen = f"is cut or was changed: {error}" if data else "is empty"
            raise CheckpointDamagedError(f"{where} {seen}") from None
        raise CheckpointError(f"{where} is not a manifest of Paceline: {error}") from None


def _manifest_in(read: _Manifest) -> Manifest:
    if read.digests != DIGEST_NAME:
        raise ValueError(f"its digests are {read.digests!r}; this version knows {DIGEST_NAME!r}")
    values: Json = msgspec.json.decode(read.values)
    tensors_in(values)  # raises RecursionError here if they are nested too deeply
    return Manifest(
        step=read.step,
        sequence=read.sequence,
        token=read.token,
        world_size=read.world_size,
        written_at_s=read.written_at_s,
        paceline=read.paceline,
        files=read.files,
        tensors=_tensors_in(read.tensors),
        values=values,
        here=read.here,
        block_nbytes=read.block_nbytes,
    )


def _tensors_out(tensors: dict[str, TensorEntry]) -> dict[str, _Tensor]:
    return {
        name: _Tensor(each.dtype, each.shape, [_piece_out(piece) for piece in each.pieces])
        for name, each in tensors.items()
    }


def _tensors_in(tensors: dict[str, _Tensor]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(each.dtype, each.shape, tuple(map(_piece_in, each.pieces))) for name, each in tensors.items()
    }


def _piece_out(piece: Piece) -> _Piece:
    written = _Piece(piece.file, piece.key, piece.at, piece.digests)
    if isinstance(piece.region, Flat):
        written.flat = (piece.region.start, piece.region.stop)
    else:
        written.offset, written.shape = piece.region.offset, piece.region.shape
    return written


def _piece_in(read: _Piece) -> Piece:
    region: Region
    if read.flat is not None:
        region = Flat(*read.flat)
    elif read.offset is not None and read.shape is not None:
        region = Box(read.offset, read.shape)
    else:
        raise ValueError(f"the piece {read.key} says neither `flat` nor `offset` and `shape`")
    return Piece(read.file, read.key, read.at, region, read.digests)


def _encode(value: object) -> bytes:
    if isinstance(value, _Tensor):  # members that are None are left out
        pieces = [
            {name: member for name, member in vars(piece).items() if member is not None} for piece in value.pieces
        ]
        value = {"dtype": value.dtype, "shape": value.shape, "pieces": pieces}
    return msgspec.json.encode(value)


def _member(name: str, value: bytes) -> bytes:
    return b" " + msgspec.json.encode(name) + b": " + value


def _lines(members: dict[str, bytes]) -> bytes:
    if not members:
        return b"{}"
    return b"{\n" + b",\n".join(b" " + _member(name, value) for name, value in members.items()) + b"\n }"
