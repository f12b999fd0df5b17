"""A small state on two ranks, different in each step, with functions to save it and to identify the saved step."""

from __future__ import annotations

import struct
from dataclasses import replace

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.manifest import Draft, RankPart
from paceline.train.checkpoint.format.part_writer import WriteItem, write_part
from paceline.train.checkpoint.format.regions import Flat, TensorBlock, whole
from paceline.train.checkpoint.format.root import Listing, Root
from paceline.train.checkpoint.format.values import encode

WORLD_SIZE = 2
SHAPE = (6, 50)
NAMES = ("model/weight", "model/bias", "optimizer/avg")


def floats(step: int, count: int) -> bytes:
    return struct.pack(f"<{count}f", *([float(step)] * count))


def pieces(step: int, rank: int) -> list[WriteItem]:
    """Returns a rank's pieces: the weight is sharded by row, the average by column, and rank 1 has the bias."""
    half = SHAPE[0] * SHAPE[1] // 2
    return [
        WriteItem("model/weight", "F32", SHAPE, Flat(rank * half, (rank + 1) * half), floats(step, half)),
        *([WriteItem("model/bias", "I64", (3,), whole((3,)), struct.pack("<3q", step, step, step))] if rank else []),
        WriteItem("optimizer/avg", "F32", SHAPE, TensorBlock((0, 25 * rank), (6, 25)), lambda: floats(step, half)),
    ]


def write(root: Root, draft: Draft, step: int, rank: int) -> RankPart:
    return write_part(root.storage, draft, rank, pieces(step, rank), split_nbytes=700)


def save(root: Root, step: int) -> str:
    """Saves on behalf of both ranks, one after the other; returns the checkpoint's name."""
    draft = root.begin(step, nbytes=5000)
    parts = [write(root, draft, step, rank) for rank in range(WORLD_SIZE)]
    root.publish(draft, parts, encode({"step": step}), world_size=WORLD_SIZE)
    return draft.name


def newest_whole(root: Root, *, digests: bool = False) -> tuple[Listing | None, list[Listing]]:
    """Returns the newest checkpoint without a fault, and the newer checkpoints with their faults.

    If `digests` is set, the digests of all files are compared, rather than only their sizes.
    """
    skipped: list[Listing] = []
    for listing in root.listing():
        fault = listing.fault
        if fault is None and digests:
            fault = fault_of_digests(root, listing.name)
        if fault is None:
            return listing, skipped
        skipped.append(replace(listing, fault=fault))
    return None, skipped


def fault_of_digests(root: Root, name: str) -> str | None:
    try:
        with root.open(name) as checkpoint:
            return next(iter(checkpoint.verify()), None)
    except CheckpointError as error:
        return str(error)


def steps_in(root: Root, name: str) -> set[float]:
    """Returns the distinct numbers in all checkpoints in a root directory."""
    with root.open(name) as checkpoint:
        return steps_in_checkpoint(checkpoint)


def steps_in_checkpoint(checkpoint: Checkpoint) -> set[float]:
    """Returns the distinct numbers in a checkpoint: only its step, unless two steps are mixed."""
    found: set[float] = set()
    for tensor in NAMES:
        data = checkpoint.read(tensor)
        kind = "q" if checkpoint.entry(tensor).dtype == "I64" else "f"
        found |= {each for (each,) in struct.iter_unpack(f"<{kind}", data)}
    values = checkpoint.manifest.values
    assert isinstance(values, dict)
    step = values["step"]
    assert isinstance(step, int)
    return found | {step}
