"""`paceline checkpoint verify`: every byte of a checkpoint against its digest."""

from __future__ import annotations

import argparse
import sys

from paceline.checkpoint.format.checkpoint import Checkpoint
from paceline.checkpoint.format.manifest import FILE
from paceline.checkpoint.format.places import Place, place_at
from paceline.checkpoint.format.progress import Progress
from paceline.checkpoint.format.reading import listing_of
from paceline.checkpoint.format.refusals import size
from paceline.errors import CheckpointError


def verify(options: argparse.Namespace) -> int:
    """Prints a line for each checkpoint and each fault; returns the exit code."""
    place = place_at(options.path)
    names = [""] if place.size(FILE) is not None else [each.name for each in listing_of(place)]
    if not names:
        print(f"paceline checkpoint verify: {place.describe()} has no checkpoint", file=sys.stderr)
        return 2
    newest: str | None = None
    code = 0
    for name in names:
        faults = _verify_one(place, name)
        if faults:
            code = 1
        elif newest is None:
            newest = name
    if len(names) > 1 and code:
        print(f"restoring would take {place.describe(newest)}" if newest is not None else "none of them is whole")
    return code


def _verify_one(place: Place, name: str) -> list[str]:
    where = place.describe(name)
    try:
        with Checkpoint(place, name) as checkpoint:
            faults = checkpoint.verify(Progress(f"{where}: read"))
            nbytes, tensors = checkpoint.nbytes_read, len(checkpoint.manifest.tensors)
    except CheckpointError as error:
        faults = [str(error)]
    if not faults:
        print(f"{where}: whole; {tensors} tensors, {size(nbytes)} compared with their digests")
    for fault in faults:
        print(f"{where}: DAMAGED: {fault}")
    return faults
