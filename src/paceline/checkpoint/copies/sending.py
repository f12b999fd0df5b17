"""How a checkpoint is copied: every rank writes its part into vaults, and then all of these are given the manifest.

A copy counts once a vault has the manifest, which exists only when all ranks have written; so a rank that dies at any
step leaves the copies from before. Vaults keep those until the next copy is begun.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from paceline.checkpoint.copies.client import VaultClient
from paceline.checkpoint.copies.messages import Begin
from paceline.checkpoint.copies.place import CopyTarget
from paceline.checkpoint.format import manifest_json
from paceline.checkpoint.format.drafts import Draft
from paceline.checkpoint.format.parts import Outgoing, write_part
from paceline.checkpoint.format.saving import manifest_of
from paceline.checkpoint.format.values import Json
from paceline.elastic.failpoints import reach


class Told(Protocol):
    """How ranks tell each other what they have done, as `talking.Talk`."""

    rank: int
    size: int

    def collect(self, mine: bytes) -> list[bytes]:
        """Returns what every rank has, on rank 0."""
        ...

    def announce(self, text: bytes) -> bytes:
        """Returns what rank 0 has."""
        ...


@dataclass(frozen=True)
class Copying:
    """What a rank copies where.

    Attributes:
        root: the directory on the disk, by rank 0's path.
        draft: of the checkpoint.
        keep: the token of the checkpoint that stays until this one is whole; None if there is none.
        pieces: what this rank writes.
        values: the plain values that it contributes.
        addresses: of the vaults that it writes into.
        vaults: all that take part, by identity, with their addresses for other hosts.
    """

    root: str
    draft: Draft
    keep: str | None
    pieces: Sequence[Outgoing]
    values: Mapping[str, Json]
    addresses: Sequence[str]
    vaults: Mapping[str, str]


def copy(
    copying: Copying,
    talks: tuple[Told, Told],
    dial: Callable[[str], VaultClient],
    told: Callable[[Callable[[], bytes]], bytes],
    heard: Callable[[bytes], bytes],
) -> None:
    """Copies a checkpoint into vaults; every rank calls this. It is there on all of them when this returns.

    Rank 0 announces in either round what came of it, also if a rank could not be heard: the others wait for that.

    Args:
        talks: one for each of the two rounds.
        dial: connects to a vault.
        told, heard: turn what a rank has done, or why it could not, into bytes and back.

    Raises:
        CheckpointError: a rank or a vault failed.
    """
    first, second = talks
    with ExitStack() as closing:
        clients: list[VaultClient] = []

        def write() -> bytes:
            for address in copying.addresses:
                clients.append(dial(address))
                closing.callback(clients[-1].close)
            return _written(copying, clients, first.rank)

        def commit() -> bytes:
            manifest = heard(verdict)
            files = {name: each.nbytes for name, each in manifest_json.from_bytes(manifest, "").files.items()}
            for client in clients:
                client.commit(copying.root, copying.draft.token, manifest, files, copying.vaults)
            return b""

        written = told(write)
        verdict = first.announce(
            told(lambda: _manifest(copying, [heard(each) for each in first.collect(written)], first.size))
        )
        committed = told(commit)
        heard(second.announce(told(lambda: _require_all(second.collect(committed), heard))))
    reach("copies.done")


def _written(copying: Copying, clients: Sequence[VaultClient], rank: int) -> bytes:
    draft, nbytes = copying.draft, sum(each.nbytes for each in copying.pieces)
    for client in clients:
        client.begin(Begin(copying.root, draft.token, draft.sequence, draft.step, copying.keep, nbytes))
    part = write_part(CopyTarget(clients, copying.root, draft.token), draft, rank, copying.pieces)
    return json.dumps([manifest_json.part_to_bytes(part).decode(), copying.values]).encode()


def _require_all(outcomes: Sequence[bytes], heard: Callable[[bytes], bytes]) -> bytes:
    for each in outcomes:
        heard(each)
    return b""


def _manifest(copying: Copying, everyone: Sequence[bytes], size: int) -> bytes:
    """Returns the manifest, on rank 0; where several ranks have a value, that of the first one counts."""
    if not everyone:
        return b""
    answers = [json.loads(each) for each in everyone]
    parts = [manifest_json.part_from_bytes(part.encode()) for part, _ in answers]
    values: dict[str, Json] = {}
    for _, own in reversed(answers):
        values |= own
    return manifest_json.to_bytes(manifest_of(copying.draft, parts, values, size, None))
