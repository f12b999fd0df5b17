"""`paceline runs`: the jobs whose directories are kept."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path

from paceline.observe.runs import Run, list_runs, runs_directory, when

_LONGEST_COMMAND = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `paceline runs`."""
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        help="where the jobs' directories are, such as what was given as --log-dir (default: PACELINE_RUNS_DIR, or "
        "paceline/runs in XDG_STATE_HOME or ~/.local/state)",
    )
    parser.add_argument("--json", action="store_true", help="print all that is known of each job, as lines of JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the list; returns the exit code."""
    directory = options.directory or runs_directory()
    found = list_runs(directory)
    for each in found:
        print(json.dumps(_facts(each)) if options.json else line_of(each))
    if not found and not options.json:
        print(f"There are no jobs in {directory}.")
    return 0


def _facts(run: Run) -> dict[str, object]:
    return {**asdict(run), "directory": str(run.directory), "state": run.state.value}


def line_of(run: Run) -> str:
    """Returns one line about a job: when it began, how it ended, what it ran, and its directory's name."""
    state = run.state.value if run.exit_code in (None, 0) else f"{run.state.value} ({run.exit_code})"
    command = shlex.join(run.command)
    if len(command) > _LONGEST_COMMAND:
        command = f"{command[: _LONGEST_COMMAND - 3]}..."
    return f"{when(run)}  {state:<12}  {command:<{_LONGEST_COMMAND}}  {run.id}"
