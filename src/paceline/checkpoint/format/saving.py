"""How a checkpoint becomes visible: at once, and only when it survives the loss of power.

The order is what makes it safe: the files of all ranks are durable before the manifest is written, the manifest before
the directory gets its name, and the name before `latest` says it. Old ones are removed after that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from paceline import __version__
from paceline.checkpoint.format import manifest_json
from paceline.checkpoint.format.drafts import LATEST, REMOVING, WRITING, Draft, is_name
from paceline.checkpoint.format.manifest import FILE, Manifest, Part, merged
from paceline.checkpoint.format.places import OutputFile, Place
from paceline.checkpoint.format.reading import Listing, latest_name, listing_of
from paceline.checkpoint.format.values import Json
from paceline.elastic.failpoints import reach
from paceline.errors import CheckpointError


def prepare(place: Place, draft: Draft) -> OutputFile | None:
    """Makes the directory in which ranks write; returns its manifest, still empty and held, if the place renames."""
    place.make_directory("")
    place.make_directory(draft.directory)
    return place.create(f"{draft.directory}/{FILE}") if place.renames else None


def manifest_of(
    draft: Draft, parts: Sequence[Part], values: Json, world_size: int, here: Sequence[str] | None
) -> Manifest:
    """Returns what describes a checkpoint of these parts.

    Raises:
        CheckpointError: the parts do not make up one state.
    """
    missing = sorted({*range(world_size)} - {part.rank for part in parts})
    if missing or len(parts) != world_size:
        raise CheckpointError(
            f"a checkpoint of {world_size} ranks needs one part of each; there are {len(parts)}"
            + (f", and none of rank {missing[0]}" if missing else "")
        )
    files, tensors = merged(parts)
    return Manifest(
        step=draft.step,
        sequence=draft.sequence,
        token=draft.token,
        world_size=world_size,
        written_at_s=time.time(),
        paceline=__version__,
        files=files,
        tensors=tensors,
        values=values,
        here=None if here is None else tuple(sorted(here)),
    )


def publish(place: Place, draft: Draft, manifest: Manifest, held: OutputFile | None) -> None:
    """Makes a checkpoint visible whose files are durable; it survives the loss of power when this returns."""
    text = memoryview(manifest_json.to_bytes(manifest))
    file = held if held is not None else place.create(f"{draft.directory}/{FILE}")
    with contextlib.closing(file):
        file.write([text])
        file.commit()
        place.sync_directory(draft.directory)
        if place.renames:
            place.rename(draft.directory, draft.name)
            place.sync_directory("")
    point_to(place, draft)
    reach("checkpoint.done")


def point_to(place: Place, draft: Draft) -> None:
    """Writes the pointer `latest`, which people and other programs read; ranks that restore look at the manifests."""
    line = memoryview(f"{draft.name}\n".encode())
    written = f"{WRITING}{LATEST}-{draft.token}" if place.renames else LATEST
    file = place.create(written)
    with contextlib.closing(file):
        file.write([line])
        file.commit()
    if place.renames:
        place.rename(written, LATEST)
    place.sync_directory("")


def remove_left_overs(place: Place) -> list[str]:
    """Removes what saves and removals left that did not come to their end, unless a live process writes it."""
    removed = []
    for name in place.names():
        is_left_over = name.startswith(WRITING) and not place.is_held(name)
        if is_left_over or name.startswith(REMOVING) or _is_unfinished(place, name):
            place.remove(name)
            removed.append(name)
    return removed


def _is_unfinished(place: Place, name: str) -> bool:
    """Whether this is a directory that never got its manifest, where places do not rename."""
    return not place.renames and is_name(name) and place.size(f"{name}/{FILE}") is None and not place.is_held(name)


def retire(place: Place, keep: int) -> list[str]:
    """Removes all checkpoints but the newest whole ones; returns the names of those that were removed.

    It leaves the one that `latest` names, those that are being read, those whose manifest it cannot read, which may be
    of a newer version, and all if none is whole.
    """
    listings = [each for each in listing_of(place) if each.sequence is not None]
    kept = _to_keep(listings, keep)
    latest = latest_name(place)
    removed = []
    for each in listings:
        if kept and each.name not in kept and each.name != latest and not place.is_held(each.name):
            remove(place, each.name)
            removed.append(each.name)
    return removed


def _to_keep(listings: list[Listing], keep: int) -> set[str]:
    """The newest whole ones, and whatever is newer than the oldest of them, which may be of use to a person."""
    whole = [each for each in listings if each.fault is None][:keep]
    if not whole:
        return set()
    oldest = whole[-1].sequence or 0
    return {each.name for each in listings if each in whole or (each.sequence or 0) > oldest}


def remove(place: Place, name: str) -> None:
    """Removes a checkpoint so that it is never seen in part."""
    if place.renames:
        doomed = f"{REMOVING}{name}"
        place.remove(doomed)
        place.rename(name, doomed)
        place.sync_directory("")
        place.remove(doomed)
    else:
        place.remove(f"{name}/{FILE}")
        place.remove(name)
