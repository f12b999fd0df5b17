"""Which checkpoints a root has, in which order, and what is wrong with those that are not whole."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from paceline.checkpoint.format import manifest_json
from paceline.checkpoint.format.drafts import LATEST, WRITING, is_name
from paceline.checkpoint.format.manifest import FILE, Manifest, Summary
from paceline.checkpoint.format.places import Place, Source
from paceline.checkpoint.format.refusals import could_not
from paceline.errors import CheckpointDamagedError, CheckpointError

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


def read_manifest(place: Source, directory: str) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointDamagedError: there is none, or it is cut or was changed.
        CheckpointError: it is of another version, or cannot be read.
    """
    return manifest_json.from_bytes(*_manifest_text(place, directory))


def _manifest_text(place: Source, directory: str) -> tuple[bytes, str]:
    """Returns what the manifest's file holds, and the file's name for errors."""
    name = f"{directory}/{FILE}" if directory else FILE
    try:
        return read_file(place, name), place.describe(name)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{place.describe(directory)} has no {FILE}: it was not finished") from None
    except OSError as error:
        raise could_not("read", place, name, error) from error


def read_file(place: Source, name: str) -> bytes:
    """Returns all that a small file holds."""
    file = place.open(name)
    with contextlib.closing(file):
        if (nbytes := file.size()) > _MOST_NBYTES:
            raise CheckpointDamagedError(f"{place.describe(name)} has {nbytes:,} bytes, too many for what it should be")
        buffer = bytearray(nbytes)
        return bytes(buffer[: file.read_into(0, memoryview(buffer))])


def _fault_of_sizes(place: Place, directory: str, summary: Summary) -> str | None:
    """Returns which of a checkpoint's files is missing or has the wrong size; None if all are there."""
    for name, entry in summary.files_here().items():
        path = f"{directory}/{name}"
        nbytes = place.size(path)
        if nbytes is None:
            return f"{place.describe(path)} is missing"
        if nbytes != entry.nbytes:
            return f"{place.describe(path)} has {nbytes:,} bytes instead of {entry.nbytes:,}"
    return None


def look_at(place: Place, name: str) -> Listing:
    """Returns what is known of one checkpoint; all its files are there, with their sizes, if it has no fault."""
    try:
        summary = manifest_json.summary_from_bytes(*_manifest_text(place, name))
        fault = _fault_of_sizes(place, name, summary)
    except (CheckpointError, OSError, KeyError) as error:
        return Listing(name, fault=str(error))
    nbytes = sum(each.nbytes for each in summary.files_here().values())
    return Listing(name, summary.step, summary.sequence, summary.token, nbytes, fault)


def listing_of(place: Place) -> list[Listing]:
    """Returns the checkpoints of a root: first those whose manifest cannot be read, then those that were saved last."""
    found = [look_at(place, name) for name in place.names() if is_name(name)]
    return sorted(found, key=lambda each: (each.sequence is None, each.sequence or 0, each.name), reverse=True)


def unfinished(place: Place) -> list[str]:
    """Returns the directories of saves that did not come to their end, or have not yet."""
    return sorted(name for name in place.names() if name.startswith(WRITING))


def latest_name(place: Place) -> str | None:
    """Returns what the pointer `latest` names; None if there is none."""
    try:
        return read_file(place, LATEST).decode("utf-8", "replace").strip() or None
    except (FileNotFoundError, CheckpointDamagedError):
        return None
