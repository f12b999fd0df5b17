"""Encodes manifests as JSON. The last member is a digest of the preceding text, which detects truncation and edits.

Digests (XXH3, 128 bits) detect accidental damage, not attacks. Computing them takes about as long as reading the
memory. A cryptographic digest would take several times as long without more protection: a program that can change a
file can also change the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import xxhash

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format.manifest import (
    BLOCK_NBYTES,
    VERSION,
    Manifest,
    RankPart,
    Summary,
    fault_of,
    fault_of_summary,
)
from paceline.train.checkpoint.format.values import Json, tensors_in

DIGEST_NAME = "xxh3_128"
_FORMAT = "paceline-checkpoint"
_DIGEST = b',\n "digest": "'
_END = b'"\n}\n'
T = TypeVar("T")


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Returns the digest of `data` as a hexadecimal string."""
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


def to_bytes(manifest: Manifest) -> bytes:
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


def from_bytes(data: bytes, where: str) -> Manifest:
    """Decodes and checks a manifest encoded by `to_bytes`.

    Args:
        data: the contents of the manifest file.
        where: the name of the file, for error messages.

    Raises:
        CheckpointDamagedError: the manifest is truncated, changed or contradictory.
        CheckpointError: the data is not a manifest, or has an unsupported version.
    """

    def decode() -> Manifest:
        manifest = msgspec.json.decode(data, type=Manifest)
        tensors_in(manifest.values)  # raises RecursionError here if values are nested too deeply
        return manifest

    return _sound(_read(data, where, decode), where, fault_of)


def summary_from_bytes(data: bytes, where: str) -> Summary:
    """Decodes the members of a manifest that are needed to list checkpoints, but not the possibly numerous tensors.

    Raises:
        CheckpointDamagedError, CheckpointError: as for `from_bytes`.
    """
    return _sound(_read(data, where, lambda: msgspec.json.decode(data, type=Summary)), where, fault_of_summary)


def _sound(read: T, where: str, fault_of: Callable[[T], str | None]) -> T:
    if (fault := fault_of(read)) is not None:
        raise CheckpointDamagedError(f"{where} contradicts itself: {fault}")
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
            raise CheckpointDamagedError(f"{where} was changed: its text does not have the digest at its end")
        if kind.digests != DIGEST_NAME:
            raise ValueError(f"its digests are {kind.digests!r}; this version knows {DIGEST_NAME!r}")
        return decode()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if not is_intact:
            seen = f"is cut or was changed: {error}" if data else "is empty"
            raise CheckpointDamagedError(f"{where} {seen}") from None
        raise CheckpointError(f"{where} is not a manifest of Paceline: {error}") from None


def _member(name: str, value: bytes) -> bytes:
    return b" " + msgspec.json.encode(name) + b": " + value


def _lines(members: Mapping[str, object]) -> bytes:
    if not members:
        return b"{}"
    lines = (b" " + _member(name, msgspec.json.encode(value)) for name, value in members.items())
    return b"{\n" + b",\n".join(lines) + b"\n }"
