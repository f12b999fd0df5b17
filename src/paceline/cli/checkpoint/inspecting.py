"""`paceline checkpoint inspect`: the checkpoints of a directory, or what one holds."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from paceline.checkpoint.format.checkpoint import Checkpoint
from paceline.checkpoint.format.dtypes import ITEMSIZE, nbytes_of
from paceline.checkpoint.format.manifest import FILE, Manifest
from paceline.checkpoint.format.places import Place, place_at
from paceline.checkpoint.format.reading import Listing, latest_name, listing_of, unfinished
from paceline.checkpoint.format.refusals import size
from paceline.checkpoint.format.values import Json
from paceline.cli.checkpoint.leaves import leaves
from paceline.cli.checkpoint.sources import Source, foreign_at, source_of


def inspect(options: argparse.Namespace) -> int:
    """Prints what is there; returns the exit code."""
    if foreign_at(options.path) is not None:
        _show_foreign(source_of(options.path), options.json)
        return 0
    place = place_at(options.path)
    if place.size(FILE) is not None:
        with Checkpoint(place, "") as checkpoint:
            _show_checkpoint(checkpoint, options.json)
        return 0
    listings = listing_of(place)
    if not listings and not unfinished(place):
        print(f"paceline checkpoint inspect: {place.describe()} is no checkpoint and has none in it", file=sys.stderr)
        return 2
    _show_root(place, listings, options.json)
    return 0


def _show_root(place: Place, listings: list[Listing], as_json: bool) -> None:
    latest, dead = latest_name(place), unfinished(place)
    if as_json:
        print(json.dumps({"latest": latest, "checkpoints": [asdict(each) for each in listings], "unfinished": dead}))
        return
    for each in listings:
        mark = "  <- latest" if each.name == latest else ""
        step = "" if each.step is None else f"step {each.step}"
        state = "whole" if each.fault is None else f"DAMAGED: {each.fault}"
        print(f"{each.name:<20} {step:<14} {size(each.nbytes):>10}  {state}{mark}")
    for name in dead:
        state = "is being written" if place.is_held(name) else "was not finished; the next save removes it"
        print(f"{name}  {state}")


def _show_checkpoint(checkpoint: Checkpoint, as_json: bool) -> None:
    manifest = checkpoint.manifest
    if as_json:
        tensors = {
            name: {"dtype": each.dtype, "shape": each.shape, "pieces": len(each.pieces)}
            for name, each in manifest.tensors.items()
        }
        print(json.dumps({**_facts(manifest), "tensors": tensors, "values": manifest.values}))
        return
    facts = _facts(manifest)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.written_at_s))
    step = "" if manifest.step is None else f"step {manifest.step}, "
    ranks = f"{manifest.world_size} rank" + "s" * (manifest.world_size != 1)
    print(f"{checkpoint.describe()}: {step}saved {when} by {ranks} of Paceline {manifest.paceline}")
    print(f"{len(manifest.tensors)} tensors in {len(manifest.files)} files, {size(int(str(facts['nbytes'])))}")
    _show_tensors(
        {
            name: (each.dtype, each.shape, "" if len(each.pieces) == 1 else f"{len(each.pieces)} pieces")
            for name, each in manifest.tensors.items()
        }
    )
    _show_values(dict(leaves(manifest.values)))


def _show_foreign(source: Source, as_json: bool) -> None:
    if as_json:
        tensors = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in source.tensors.items()}
        print(json.dumps({"title": source.title, "tensors": tensors, "values": source.values}))
        return
    print(f"{source.title}: {len(source.tensors)} tensors")
    _show_tensors({name: (dtype, shape, "") for name, (dtype, shape) in source.tensors.items()})
    _show_values(source.values)


def _show_tensors(tensors: dict[str, tuple[str, tuple[int, ...], str]]) -> None:
    width = max(map(len, tensors), default=0)
    for name, (dtype, shape, note) in tensors.items():
        extents = " x ".join(map(str, shape)) or "scalar"
        nbytes = size(nbytes_of(dtype, shape)) if dtype in ITEMSIZE else ""
        print(f"  {name:<{width}}  {dtype:<8} {extents:<16} {nbytes:>9}  {note}".rstrip())


def _show_values(values: dict[str, Json]) -> None:
    for name, value in values.items():
        print(f"  {name} = {json.dumps(value)}")


def _facts(manifest: Manifest) -> dict[str, object]:
    return {
        "step": manifest.step,
        "sequence": manifest.sequence,
        "world_size": manifest.world_size,
        "written_at_s": manifest.written_at_s,
        "paceline": manifest.paceline,
        "nbytes": sum(each.nbytes for each in manifest.files.values()),
    }
