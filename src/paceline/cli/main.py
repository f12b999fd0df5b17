"""The `paceline` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import __version__


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(prog="paceline", description="Distributed data-parallel training for PyTorch.")
    top.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script on several processes of this machine",
        description="Runs a script on several processes of this machine, as torchrun does. Each worker finds RANK, "
        "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment; init_process_group() takes none.",
    )
    run.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=_workers,
        default=1,
        metavar="N|auto",
        help="the number of workers; auto: one for each core (default: 1)",
    )
    run.add_argument(
        "--standalone", action="store_true", help="one machine, nothing to agree on; always so in this version"
    )
    run.add_argument(
        "--master-port",
        "--master_port",
        type=_port,
        metavar="PORT",
        help="MASTER_PORT of the workers (default: a free one)",
    )
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    run.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code."""
    options = parser().parse_args(arguments)
    if not options.module and not Path(options.script).is_file():
        print(f"paceline run: {options.script} is not a file; with -m it would be a module", file=sys.stderr)
        return 2
    from paceline.launch.agent import Job, run

    return run(Job([options.script, *options.args], options.nproc_per_node, options.module, options.master_port))


def _workers(text: str) -> int:
    if text == "auto":
        from paceline.launch.environment import allowed_cores

        return allowed_cores()
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number from 1 nor auto")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)
