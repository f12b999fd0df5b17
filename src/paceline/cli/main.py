"""Parses the `paceline` command line and runs the subcommand."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from paceline.cli import analyze, launch_script, migrate, plan, report, runs, trace
from paceline.cli.checkpoint import command as checkpoint
from paceline.cli.doctor import command as doctor
from paceline.cli.top import command as top
from paceline.cli.version import VersionAction
from paceline.launch.command import add_run_arguments, run
from paceline.launch.flags import is_flag
from paceline.launch.grammar import Parser

COMMANDS = (
    "run",
    "join",
    "launch-script",
    "doctor",
    "plan",
    "analyze",
    "runs",
    "trace",
    "report",
    "top",
    "checkpoint",
    "migrate",
)


def parser(environment: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    whole = Parser(prog="paceline", description="Distributed data-parallel training for PyTorch.")
    whole.add_argument("--version", action=VersionAction, help="print what is installed, and which kernels are used")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
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
    joining.add_argument(
        "token",
        metavar="TOKEN",
        help="- asks for what `paceline run --print-token` printed, or reads it from stdin; "
        "as an argument it could be seen by other users",
    )
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
    planning = commands.add_parser(
        "plan",
        help="measure a script, and predict how fast it would train on other machines",
        description="With --measure, runs SCRIPT for some steps on this machine and writes a calibration. With a "
        "calibration, predicts the step, the rate, the memory and the cost on other numbers of machines, and says what "
        "to change.",
    )
    plan.add_arguments(planning)
    analyzing = commands.add_parser(
        "analyze",
        help="say from a job's files what went wrong, and for whom the others waited",
        description="Reads the recordings that a job left in RUN_DIR, and says which rank failed, did not come or was "
        "late as a rule, and why. Some of the files may be missing.",
    )
    analyze.add_arguments(analyzing)
    listing = commands.add_parser(
        "runs",
        help="list the latest jobs of this user on this machine",
        description="Lists the jobs that have a directory with their recordings, the latest first: when each began, "
        "how it ended and what it ran.",
    )
    runs.add_arguments(listing)
    tracing = commands.add_parser(
        "trace",
        help="write what a job recorded as a trace for ui.perfetto.dev",
        description="Writes the calls, steps and spans of all ranks of a job on one time axis, with arrows from sends "
        "to receives, as a trace that ui.perfetto.dev and chrome://tracing show.",
    )
    trace.add_arguments(tracing)
    reporting = commands.add_parser(
        "report",
        help="write what a job recorded into one file of HTML, to look at or to attach to an issue",
        description="Reads the recordings and logs that a job left in RUN_DIR, and writes one page of HTML that needs "
        "nothing else to be looked at. It holds what the job printed and the names of its hosts.",
    )
    report.add_arguments(reporting)
    watching = commands.add_parser(
        "top",
        help="show a running job in the terminal",
        description="Shows a job that was started with `paceline run --dash`, by default the latest of this user's on "
        "this machine. With paceline[top], its table can be scrolled and sorted.",
    )
    top.add_arguments(watching)
    saved = commands.add_parser(
        "checkpoint",
        help="show, verify, compare and export checkpoints",
        description="Shows, verifies, compares and exports the checkpoints that paceline.save and CheckpointManager "
        "wrote.",
    )
    checkpoint.add_arguments(saved)
    migrating = commands.add_parser(
        "migrate",
        help="rewrite a program of torch.distributed or Horovod, and the files that start it",
        description="Rewrites Python files, shell scripts, batch files, YAML and Dockerfiles so that they use "
        "Paceline. Prints the changes as a diff, or with --write makes them; what is left to do becomes a comment with "
        "the reason. Needs paceline[migrate].",
    )
    migrate.add_arguments(migrating)
    for command in commands.choices.values():
        command.whole = whole
    return whole


def _mistaken_command(words: Sequence[str]) -> str | None:
    """Returns what to type instead, if the first word is no command."""
    import shlex
    from difflib import get_close_matches

    if not words:
        return f"a command is missing: {', '.join(COMMANDS)}"
    first = words[0]
    if first in (*COMMANDS, "-h", "--help", "--version"):
        return None
    if first.startswith("-") and (first == "-" or not is_flag(first)):
        meant = get_close_matches(first, ("--version", "--help"), n=1)
        return f"{first} is not a flag" + (f"; did you mean `paceline {meant[0]}`?" if meant else "")
    near = get_close_matches(first, COMMANDS, n=1)
    if near and not os.path.exists(first):
        return f"{first} is not a command; did you mean `paceline {near[0]}`?"
    whole = shlex.join(["paceline", "run", *words])
    return f"{first} is not a command; did you mean `{whole}`?"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if mistake := _mistaken_command(words):
        print(f"paceline: {mistake}\nSee `paceline --help` for all commands.", file=sys.stderr)
        return 2
    options = parser().parse_args(words)
    if options.command == "run":
        options.words = words[1:]  # what --hosts has other machines run
    others = {
        "launch-script": launch_script.run,
        "doctor": doctor.run,
        "plan": plan.run,
        "analyze": analyze.run,
        "runs": runs.run,
        "trace": trace.run,
        "report": report.run,
        "top": top.run,
        "checkpoint": checkpoint.run,
        "migrate": migrate.run,
    }
    command = others.get(options.command)
    return run(options) if command is None else _printed(lambda: command(options))


def _printed(command: Callable[[], int]) -> int:
    """Runs a command that prints; returns its exit code, or that of SIGPIPE if nobody reads on, as in `... | head`."""
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_without_reader(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 128 + signal.SIGPIPE
    return code


def _is_without_reader(descriptor: int) -> bool:
    watched = select.poll()
    watched.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))
