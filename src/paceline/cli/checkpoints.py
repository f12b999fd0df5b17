"""Implements `paceline checkpoint export`, `verify`, `diff` and `inspect`.

`CheckpointContents` provides access to the tensors and plain values in a checkpoint, regardless of its format.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import CheckpointError, and_more, printable
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.checkpoint import export as write
from paceline.train.checkpoint.format.local_storage import open_storage
from paceline.train.checkpoint.format.manifest import FILE
from paceline.train.checkpoint.format.root import Listing, latest_name, listing_of, open_checkpoint, unfinished
from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE, nbytes_of
from paceline.train.checkpoint.format.storage import ProgressPrinter, Storage, size_text
from paceline.train.checkpoint.format.values import SEPARATOR, Json, encode, unescaped, without_rank

if TYPE_CHECKING:
    import torch

    from paceline.train.checkpoint.foreign.foreign_file import ForeignCheckpoint


_MOST_NAMED = 8


def inspect(options: argparse.Namespace) -> int:
    """Lists the checkpoints in a directory, or prints the contents of a single checkpoint; returns the exit code."""
    if foreign_at(options.path) is not None:
        _show_foreign(contents_of(options.path), options.json)
        return 0
    storage = open_storage(options.path)
    if storage.size(FILE) is not None:
        with Checkpoint(storage, "") as checkpoint:
            _show_checkpoint(checkpoint, options.json)
        return 0
    listings = listing_of(storage)
    if not listings and not unfinished(storage):
        raise CheckpointError(f"{storage.describe()} does not exist, or is not a checkpoint and contains none")
    _show_root(storage, listings, options.json)
    return 0


def _show_root(storage: Storage, listings: list[Listing], as_json: bool) -> None:
    latest, dead = latest_name(storage), unfinished(storage)
    if as_json:
        print(
            json.dumps({"latest": latest, "checkpoints": [asdict(listing) for listing in listings], "unfinished": dead})
        )
        return
    for listing in listings:
        mark = "  <- latest" if listing.name == latest else ""
        step = "" if listing.step is None else f"step {listing.step}"
        state = "whole" if listing.fault is None else f"DAMAGED: {listing.fault}"
        print(printable(f"{listing.name:<20} {step:<14} {size_text(listing.nbytes):>10}  {state}{mark}"))
    for name in dead:
        state = "is being written" if storage.is_held(name) else "was not finished; the next save removes it"
        print(printable(f"{name}  {state}"))


def _show_checkpoint(checkpoint: Checkpoint, as_json: bool) -> None:
    manifest = checkpoint.manifest
    nbytes = sum(file.nbytes for file in manifest.files.values())
    if as_json:
        facts = {
            "step": manifest.step,
            "sequence": manifest.sequence,
            "world_size": manifest.world_size,
            "written_at_s": manifest.written_at_s,
            "paceline": manifest.paceline,
            "nbytes": nbytes,
        }
        tensors = {
            name: {"dtype": entry.dtype, "shape": entry.shape, "pieces": len(entry.pieces)}
            for name, entry in manifest.tensors.items()
        }
        print(json.dumps({**facts, "tensors": tensors, "values": manifest.values}))
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.written_at_s))
    step = "" if manifest.step is None else f"step {manifest.step}, "
    ranks = f"{manifest.world_size} rank" + "s" * (manifest.world_size != 1)
    version = _one_line(manifest.paceline)
    print(printable(f"{checkpoint.describe()}: {step}saved {when} by {ranks} of Paceline {version}"))
    print(f"{len(manifest.tensors)} tensors in {len(manifest.files)} files, {size_text(nbytes)}")
    _show_tensors(
        {
            name: (entry.dtype, entry.shape, "" if len(entry.pieces) == 1 else f"{len(entry.pieces)} pieces")
            for name, entry in manifest.tensors.items()
        }
    )
    _show_values(dict(leaves(manifest.values)))


def _show_foreign(source: CheckpointContents, as_json: bool) -> None:
    if as_json:
        tensors = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in source.tensors.items()}
        print(json.dumps({"title": source.title, "tensors": tensors, "values": source.values}))
        return
    print(printable(f"{source.title}: {len(source.tensors)} tensors"))
    _show_tensors({name: (dtype, shape, "") for name, (dtype, shape) in source.tensors.items()})
    _show_values(source.values)


def _show_tensors(tensors: dict[str, tuple[str, tuple[int, ...], str]]) -> None:
    names = list(map(_one_line, tensors))
    width = max(map(len, names), default=0)
    for name, (dtype, shape, note) in zip(names, tensors.values(), strict=True):
        extents = " x ".join(map(str, shape)) or "scalar"
        nbytes = size_text(nbytes_of(dtype, shape)) if dtype in ITEMSIZE else ""
        print(f"  {name:<{width}}  {dtype:<8} {extents:<16} {nbytes:>9}  {note}".rstrip())


def _show_values(values: dict[str, Json]) -> None:
    for name, value in values.items():
        print(f"  {_one_line(name)} = {json.dumps(value)}")


def _one_line(name: str) -> str:
    """Escapes a name from a file for printing, so that a line break in the name does not start a new line of output."""
    return printable(name).replace("\n", "\\n")


def verify(options: argparse.Namespace) -> int:
    """Verifies the digests of all data in one or more checkpoints and prints any damage; returns the exit code."""
    storage = open_storage(options.path)
    names = [""] if storage.size(FILE) is not None else [listing.name for listing in listing_of(storage)]
    if not names:
        raise CheckpointError(f"{storage.describe()} has no checkpoint")
    intact = [name for name in names if not _verify_one(storage, name)]
    if 1 < len(names) > len(intact):
        print(f"restoring would use {storage.describe(intact[0])}" if intact else "none of them is intact")
    return int(len(intact) < len(names))


def _verify_one(storage: Storage, name: str) -> list[str]:
    where = storage.describe(name)
    try:
        with Checkpoint(storage, name) as checkpoint:
            faults = checkpoint.verify(ProgressPrinter(f"{where}: read"))
            nbytes, tensors = checkpoint.nbytes_read, len(checkpoint.manifest.tensors)
    except CheckpointError as error:
        faults = [str(error)]
    if not faults:
        print(printable(f"{where}: intact; {tensors} tensors, {size_text(nbytes)} compared with their digests"))
    for fault in faults:
        print(_one_line(f"{where}: DAMAGED: {fault}"))
    return faults


def diff(options: argparse.Namespace) -> int:
    """Prints the tensors and values that differ between two checkpoints; returns the exit code."""
    first, second = contents_of(options.first), contents_of(options.second)
    with first.closing, second.closing:
        differences = [*_tensors(first, second, options.only), *_values(first, second, options.only)]
        for line in differences:
            print(_one_line(line))
        if not differences:
            print(f"{first.title} and {second.title} are identical: {len(first.tensors)} tensors, bit for bit")
    return 1 if differences else 0


def _is_meant(name: str, only: str | None) -> bool:
    whole = without_rank(name)[0]
    return only is None or whole == only or whole.startswith(f"{only}/")


def _tensors(first: CheckpointContents, second: CheckpointContents, only: str | None) -> list[str]:
    lines = []
    for name in sorted({*first.tensors, *second.tensors}):
        if not _is_meant(name, only):
            continue
        if name not in second.tensors:
            lines.append(f"{name}: only in {first.title}")
        elif name not in first.tensors:
            lines.append(f"{name}: only in {second.title}")
        elif not _have_same_digests(first.checkpoint, second.checkpoint, name):
            try:
                lines.extend(_difference(name, first.read(name), second.read(name)))
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(
                    f"the tensor {name} could not be compared: {error or 'too little memory'}"
                ) from None
    return lines


def _have_same_digests(first: Checkpoint | None, second: Checkpoint | None, name: str) -> bool:
    def known_of(checkpoint: Checkpoint) -> object:
        entry = checkpoint.entry(name)
        pieces = {(piece.region, piece.digests) for piece in entry.pieces}
        return entry.dtype, entry.shape, checkpoint.manifest.block_nbytes, pieces

    return first is not None and second is not None and known_of(first) == known_of(second)


def _difference(name: str, one: torch.Tensor, other: torch.Tensor) -> list[str]:
    import torch

    from paceline.comm.engine.channel import byte_view

    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return [f"{name}: {_kind(one)} and {_kind(other)}"]
    if (kind := _incomparable(one) or _incomparable(other)) is not None:
        return [f"{name}: not compared, because it is {kind}"]
    # The comparison is bitwise: NaN equals NaN, and 0.0 differs from -0.0.
    bits, other_bits = (byte_view(tensor.contiguous()) for tensor in (one, other))
    if torch.equal(bits, other_bits):
        return []
    differs = (bits != other_bits).reshape(-1, one.element_size()).any(1)
    wide = torch.complex128 if one.is_complex() else torch.float64
    distance = (one.reshape(-1)[differs].to(wide) - other.reshape(-1)[differs].to(wide)).abs()
    return [f"{name}: {int(differs.sum())} of {one.numel()} elements differ, by up to {distance.max().item():.3g}"]


def _incomparable(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor's elements cannot be compared, such as "sparse"; None for dense tensors."""
    import torch

    if tensor.layout != torch.strided:
        return "sparse"
    if tensor.is_quantized:
        return "quantized"
    return "without data" if tensor.is_meta else None


def _kind(tensor: torch.Tensor) -> str:
    layout = "" if str(tensor.layout) == "torch.strided" else f" ({str(tensor.layout).removeprefix('torch.')})"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{layout}"


def _values(first: CheckpointContents, second: CheckpointContents, only: str | None) -> list[str]:
    lines = []
    for name in sorted({*first.values, *second.values}):
        if not _is_meant(name, only):
            continue
        one, other = (
            json.dumps(source.values[name]) if name in source.values else "nothing" for source in (first, second)
        )
        if one != other:
            lines.append(f"{name}: {one} and {other}")
    return lines


def export_model(options: argparse.Namespace) -> int:
    """Exports tensors from a checkpoint to a single safetensors file; returns the exit code."""
    with open_checkpoint(options.path) as checkpoint:
        names = exported_names(list(checkpoint.manifest.tensors), options.only)
        if not names:
            entries = sorted({name.split(SEPARATOR)[0] for name in checkpoint.manifest.tensors})
            raise CheckpointError(
                f"{checkpoint.describe()} contains no tensors in {options.only!r}; it contains "
                f"{and_more(entries, _MOST_NAMED)}: choose one with --only, or --only '' for all"
            )
        nbytes = write(checkpoint, names, options.output, ProgressPrinter("paceline checkpoint export: wrote"))
    print(f"{options.output}: {len(names)} tensors, {size_text(nbytes)}, from {checkpoint.describe()}")
    return 0


def exported_names(tensors: list[str], entry: str) -> dict[str, str]:
    """Maps the names of the tensors under a top-level entry in the state to their names relative to that entry.

    Of the tensors that each rank saved separately, only those of rank 0 are exported.

    >>> exported_names(["model/layer.0.weight", "optimizer/state/0/exp_avg"], "model")
    {'model/layer.0.weight': 'layer.0.weight'}
    >>> exported_names(["model/mean@rank0", "model/mean@rank1"], "model")
    {'model/mean@rank0': 'mean'}
    >>> exported_names(["model@rank0/layer.0.weight", "model@rank1/layer.0.weight"], "model")
    {'model@rank0/layer.0.weight': 'layer.0.weight'}
    """
    prefix = f"{entry}{SEPARATOR}" if entry else ""
    names = {name: without_rank(name) for name in tensors}
    return {
        name: unescaped(whole[len(prefix) :])
        for name, (whole, rank) in names.items()
        if whole.startswith(prefix) and not rank
    }


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a checkpoint."""

    title: str  # path, followed by the format if another library wrote the checkpoint
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name
    values: dict[str, Json]  # plain values by path
    read: Callable[[str], torch.Tensor]
    checkpoint: Checkpoint | None  # None if another library wrote it
    closing: AbstractContextManager[object]


def contents_of(path: str) -> CheckpointContents:
    """Opens the checkpoint at a path; raises CheckpointError if there is none that is readable."""
    foreign = foreign_at(path)
    if foreign is None:
        checkpoint = open_checkpoint(path)
        manifest = checkpoint.manifest
        return CheckpointContents(
            title=checkpoint.describe(),
            tensors={name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()},
            values=dict(leaves(manifest.values)),
            read=lambda name: _tensor(checkpoint, name),
            checkpoint=checkpoint,
            closing=checkpoint,
        )
    return CheckpointContents(
        title=f"{foreign.path} ({foreign.kind})",
        tensors={
            name: (str(entry.dtype).removeprefix("torch."), entry.shape) for name, entry in foreign.tensors.items()
        },
        values=dict(leaves(_shown(foreign.tree))),
        read=foreign.read,
        checkpoint=None,
        closing=nullcontext(),
    )


def foreign_at(path: str) -> ForeignCheckpoint | None:
    """Opens a checkpoint written by another library; returns None if there is none at the path."""
    if not Path(path).is_file() and not Path(path, ".metadata").is_file():
        return None
    from paceline.train.checkpoint.foreign.foreign_file import open_foreign

    try:
        return open_foreign(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    import torch

    from paceline.train.checkpoint.pytree import type_of

    entry = checkpoint.entry(name)
    data = checkpoint.read(name)
    if not data:
        return torch.empty(entry.shape, dtype=type_of(entry.dtype), device="cpu")
    return torch.frombuffer(data, dtype=type_of(entry.dtype)).reshape(entry.shape)


def _shown(value: object) -> Json:
    """Converts a value to JSON. Values that a Paceline checkpoint cannot represent become strings."""
    if isinstance(value, dict):
        return {str(key): _shown(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_shown(member) for member in value]
    try:
        return encode(value)
    except TypeError:
        return str(value)


def leaves(value: Json, name: str = "") -> list[tuple[str, Json]]:
    """Lists the plain values in a tree with their paths; omits references to tensors.

    >>> leaves({"step": 7, "rates": [0.1, {"$tensor": "a"}], "losses": []})
    [('step', 7), ('rates/0', 0.1), ('losses', [])]
    """
    if isinstance(value, dict) and set(value) == {"$tensor"}:
        return []
    members: list[tuple[str, Json]]
    if isinstance(value, dict) and not any(key.startswith("$") for key in value):
        members = list(value.items())
    elif isinstance(value, list):
        members = [(str(index), member) for index, member in enumerate(value)]
    elif isinstance(value, dict) and isinstance(inner := value.get("$tuple", value.get("$dict")), list):
        members = [(str(index), member) for index, member in enumerate(inner)]
        if "$dict" in value:
            members = [(json.dumps(pair[0]), pair[1]) for pair in inner if isinstance(pair, list) and len(pair) == 2]
    else:
        return [(name, value)]
    if name and not members:
        return [(name, value)]
    return [leaf for key, member in members for leaf in leaves(member, f"{name}/{key}" if name else key)]
