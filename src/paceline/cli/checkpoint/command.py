"""Parses `paceline checkpoint inspect | verify | diff | export` and runs it."""

from __future__ import annotations

import argparse
import sys

from paceline.errors import CheckpointError

_PATH = "a checkpoint, or a directory of checkpoints, of which the newest whole one is taken"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the four commands and their flags."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspecting = commands.add_parser(
        "inspect",
        help="list the checkpoints of a directory, or what one of them holds",
        description="Lists the checkpoints of a directory, which of them are whole and why others are not; of one "
        "checkpoint, its tensors and values. It also reads what torch.save and torch's distributed checkpoints wrote.",
    )
    inspecting.add_argument("path", metavar="PATH", help="a directory of checkpoints, or a checkpoint")
    inspecting.add_argument("--json", action="store_true", help="print the same for programs")
    verifying = commands.add_parser(
        "verify",
        help="read every byte, and compare it with its digest",
        description="Reads every byte of a checkpoint, or of all in a directory, and names what is not as it was "
        "written. The exit code is 1 if something is not, and 2 if there is no checkpoint.",
    )
    verifying.add_argument("path", metavar="PATH", help="a directory of checkpoints, or a checkpoint")
    comparing = commands.add_parser(
        "diff",
        help="say in which tensors and values two checkpoints differ",
        description="Compares two checkpoints, which may have been saved by different numbers of ranks. The exit code "
        "is 0 if they hold the same, 1 if they do not, and 2 if one cannot be read.",
    )
    comparing.add_argument("first", metavar="PATH", help=_PATH)
    comparing.add_argument("second", metavar="OTHER", help="likewise")
    comparing.add_argument("--only", metavar="NAME", help="compare only what is in this entry of the state")
    exporting = commands.add_parser(
        "export",
        help="write a model as one safetensors file",
        description="Writes the tensors of a model as one safetensors file, which safetensors.torch and transformers "
        "read, under the names of its state_dict.",
    )
    exporting.add_argument("path", metavar="PATH", help=_PATH)
    exporting.add_argument("output", metavar="FILE", help="such as model.safetensors")
    exporting.add_argument(
        "--only", metavar="NAME", default="model", help="the entry of the state to export (default: model); '' for all"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from paceline.cli.checkpoint.comparing import diff
    from paceline.cli.checkpoint.exporting import export
    from paceline.cli.checkpoint.inspecting import inspect
    from paceline.cli.checkpoint.verifying import verify

    actions = {"inspect": inspect, "verify": verify, "diff": diff, "export": export}
    try:
        return actions[options.action](options)
    except CheckpointError as error:
        print(f"paceline checkpoint {options.action}: {error}", file=sys.stderr)
        return 2
