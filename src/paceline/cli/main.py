"""The `paceline` command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from paceline import __version__
from paceline.cli import launch_script
from paceline.cli.doctor import command as doctor
from paceline.launch.command import add_run_arguments, run


def parser(environment: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(prog="paceline", description="Distributed data-parallel training for PyTorch.")
    top.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = commands.add_parser(
        "run",
        help="run a script on several processes of one machine or several",
        description="Runs a script on several processes of one machine or several, as torchrun does. Each worker finds "
        "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment; init_process_group() needs "
        "nothing else.",
    )
    add_run_arguments(running, environment)
    joining = commands.add_parser(
        "join",
        help="take part in a job of another machine",
        description="Joins the job whose launcher printed TOKEN, with workers of this machine. Only what is given here "
        "is run: the script is the same on all machines.",
    )
    joining.add_argument("token", metavar="TOKEN", help="from `paceline run --print-token`; - reads it from stdin")
    add_run_arguments(joining, environment)
    printing = commands.add_parser(
        "launch-script",
        help="print a batch script or manifest for Slurm, Kubernetes or Ray",
        description="Prints what the scheduler needs to start SCRIPT on several machines, ready to be submitted. "
        "Kubernetes manifests hold a new secret: treat what is printed as one.",
    )
    launch_script.add_arguments(printing)
    examining = commands.add_parser(
        "doctor",
        help="examine this machine, the way to another one, or a script",
        description="Examines this machine; with --listen here and --peer there, both ways between two machines; with "
        "SCRIPT, known mistakes in it, each with its line, reason and fix.",
    )
    doctor.add_arguments(examining)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code."""
    options = parser().parse_args(arguments)
    runs = {"launch-script": launch_script.run, "doctor": doctor.run}
    return runs.get(options.command, run)(options)
