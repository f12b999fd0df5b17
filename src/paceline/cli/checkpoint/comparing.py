"""`paceline checkpoint diff`: the tensors and values in which two checkpoints differ."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from paceline.checkpoint.format.checkpoint import Checkpoint
from paceline.cli.checkpoint.sources import Source, source_of

if TYPE_CHECKING:
    import torch


def diff(options: argparse.Namespace) -> int:
    """Prints a line for each difference; returns the exit code."""
    first, second = source_of(options.first), source_of(options.second)
    with first.closing, second.closing:
        differences = [*_tensors(first, second, options.only), *_values(first, second, options.only)]
        for line in differences:
            print(line)
        if not differences:
            print(f"{first.title} and {second.title} hold the same: {len(first.tensors)} tensors, bit for bit")
    return 1 if differences else 0


def _is_meant(name: str, only: str | None) -> bool:
    return only is None or name == only or name.startswith(f"{only}/")


def _tensors(first: Source, second: Source, only: str | None) -> list[str]:
    lines = []
    for name in sorted({*first.tensors, *second.tensors}):
        if not _is_meant(name, only):
            continue
        if name not in second.tensors:
            lines.append(f"{name}: only in {first.title}")
        elif name not in first.tensors:
            lines.append(f"{name}: only in {second.title}")
        elif not _have_same_digests(first.checkpoint, second.checkpoint, name):
            lines.extend(_difference(name, first.read(name), second.read(name)))
    return lines


def _have_same_digests(first: Checkpoint | None, second: Checkpoint | None, name: str) -> bool:
    """Whether two tensors are known to be equal without being read, since they were cut alike."""
    if first is None or second is None:
        return False
    one, other = first.entry(name), second.entry(name)
    return (one.dtype, one.shape, first.manifest.block_nbytes) == (
        other.dtype,
        other.shape,
        second.manifest.block_nbytes,
    ) and {(each.region, each.digests) for each in one.pieces} == {(each.region, each.digests) for each in other.pieces}


def _difference(name: str, one: torch.Tensor, other: torch.Tensor) -> list[str]:
    import torch

    if one.dtype != other.dtype or one.shape != other.shape:
        return [f"{name}: {_kind(one)} and {_kind(other)}"]
    # Bits are compared, so that NaN equals NaN and 0.0 does not equal -0.0.
    bits, other_bits = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    if torch.equal(bits, other_bits):
        return []
    size = one.element_size()
    differs = (bits != other_bits).reshape(-1, size).any(1)
    wide = torch.complex128 if one.is_complex() else torch.float64
    distance = (one.reshape(-1)[differs].to(wide) - other.reshape(-1)[differs].to(wide)).abs()
    return [f"{name}: {int(differs.sum())} of {one.numel()} elements differ, by up to {distance.max().item():.3g}"]


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _values(first: Source, second: Source, only: str | None) -> list[str]:
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
