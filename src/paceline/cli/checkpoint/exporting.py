"""`paceline checkpoint export`: a model as one safetensors file."""

from __future__ import annotations

import argparse
import sys

from paceline.checkpoint.format.checkpoint import open_checkpoint
from paceline.checkpoint.format.export import export as write
from paceline.checkpoint.format.progress import Progress
from paceline.checkpoint.format.refusals import size
from paceline.checkpoint.names import SEPARATOR, unescaped
from paceline.wording import and_more

_MOST_NAMED = 8


def export(options: argparse.Namespace) -> int:
    """Writes the file; returns the exit code."""
    with open_checkpoint(options.path) as checkpoint:
        names = exported_names(list(checkpoint.manifest.tensors), options.only)
        if not names:
            entries = sorted({name.split(SEPARATOR)[0] for name in checkpoint.manifest.tensors})
            print(
                f"paceline checkpoint export: {checkpoint.describe()} has no tensors in {options.only!r}; it has "
                f"{and_more(entries, _MOST_NAMED)}: choose one with --only, or --only '' for all",
                file=sys.stderr,
            )
            return 2
        nbytes = write(checkpoint, names, options.output, Progress("paceline checkpoint export: wrote"))
    print(f"{options.output}: {len(names)} tensors, {size(nbytes)}, of {checkpoint.describe()}")
    return 0


def exported_names(tensors: list[str], entry: str) -> dict[str, str]:
    """Returns the tensors of an entry of the state with the names that they have within it.

    >>> exported_names(["model/layer.0.weight", "optimizer/state/0/exp_avg"], "model")
    {'model/layer.0.weight': 'layer.0.weight'}
    """
    prefix = f"{entry}{SEPARATOR}" if entry else ""
    return {name: unescaped(name[len(prefix) :]) for name in tensors if name.startswith(prefix)}
