"""Which checkpoint in the vaults is the newest whole one, and where its files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.checkpoint.copies.messages import Entry, Inventory


@dataclass(frozen=True)
class Found:
    """A whole checkpoint.

    Attributes:
        token, sequence, step: as in its manifest.
        files: their sizes.
        holders: for each file the identities of the vaults that have it.
        describers: the vaults that have the manifest.
    """

    token: str
    sequence: int
    step: int | None
    files: Mapping[str, int]
    holders: Mapping[str, Sequence[str]]
    describers: Sequence[str]


def newest(inventories: Sequence[Inventory]) -> tuple[Found | None, list[str]]:
    """Returns the newest checkpoint all of whose files some vault has, and why newer ones are not whole.

    Args:
        inventories: of all vaults that can be reached; a vault may be among them several times.
    """
    vaults = {each.vault: each for each in inventories}
    entries: dict[str, dict[str, Entry]] = {}
    for name, inventory in vaults.items():
        for entry in inventory.entries:
            entries.setdefault(entry.token, {})[name] = entry
    why: list[str] = []
    for token in sorted(entries, key=lambda each: (*_age(entries[each]), each), reverse=True):
        found, fault = _whole(token, entries[token])
        if found is not None:
            return found, why
        why.append(fault)
    return None, why


def _sequence(having: Mapping[str, Entry]) -> int:
    return max(each.sequence for each in having.values())


def _age(having: Mapping[str, Entry]) -> tuple[int, int]:
    """Returns what orders checkpoints. Two may have one sequence: a new first rank knows only those on the disk."""
    return _sequence(having), max(-1 if each.step is None else each.step for each in having.values())


def _whole(token: str, having: Mapping[str, Entry]) -> tuple[Found | None, str]:
    describers = [name for name, entry in having.items() if entry.files is not None]
    step = next(iter(having.values())).step
    if not describers:
        return None, f"the copies of step {step} were not finished"
    files = having[describers[0]].files or {}
    holders = {
        file: [name for name, entry in having.items() if entry.held.get(file) == nbytes]
        for file, nbytes in files.items()
    }
    missing = [file for file, names in holders.items() if not names]
    if missing:
        return None, f"of the copies of step {step} no launcher has {missing[0]}"
    return Found(token, _sequence(having), step, files, holders, describers), ""
