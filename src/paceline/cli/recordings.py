"""Commands that read recordings: `paceline runs`, `analyze`, `report` and `trace`."""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.operate.diagnosis.chrome_trace import trace_of
from paceline.operate.diagnosis.recording_reader import read_aligned
from paceline.operate.diagnosis.runs import JobRun, list_runs, runs_directory, when

if TYPE_CHECKING:
    from paceline.operate.dashboard.job_sample import StallNotice
    from paceline.operate.diagnosis.finding import Diagnosis
    from paceline.operate.diagnosis.postmortem import JobRemnants

_LONGEST_COMMAND = 60


def add_analyze_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `paceline analyze`."""
    parser.add_argument("directory", metavar="RUN_DIR", help="the directory of the job's recordings and logs")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def analyze(options: argparse.Namespace) -> int:
    """Prints the diagnosis of a job; returns 1 if there is a fault, 2 if there are no recordings, otherwise 0."""
    from paceline.operate.diagnosis.finding import summary

    if not Path(options.directory).is_dir():
        print(f"paceline analyze: {options.directory} is not a directory", file=sys.stderr)
        return 2
    found, verdict, late = _diagnose([options.directory])
    if not found.files:
        print(
            f"paceline analyze: {options.directory} has no recording (*.record); `paceline run --log-dir DIR` keeps "
            "those of its workers in DIR",
            file=sys.stderr,
        )
        return 2
    verdicts = [*([verdict] if verdict is not None else []), *late]
    if options.json:
        facts = [{"cause": item.cause.name, "blamed": item.blamed, "sentence": item.sentence} for item in verdicts]
        print(json.dumps({"ranks": len(found.ranks), "world_size": found.world_size, "verdicts": facts}))
    else:
        for line in [*summary(found.ranks, found.world_size), *(item.sentence for item in verdicts)]:
            print(line)
        if not verdicts:
            print("nothing is wrong: no rank failed, none waits for another, and none was late as a rule")
    return 1 if verdict is not None and verdict.is_fault else 0


def _diagnose(directories: Sequence[str | Path]) -> tuple[JobRemnants, Diagnosis | None, list[Diagnosis]]:
    """Returns a job's recordings, the diagnosis of its end, and the ranks and links that were slow most of the time."""
    from paceline.operate.diagnosis.diagnosis import diagnose
    from paceline.operate.diagnosis.postmortem import read_job
    from paceline.operate.diagnosis.slow_links import slow_network
    from paceline.operate.diagnosis.stragglers import worth_telling

    found = read_job(*directories)
    return found, diagnose(found.snapshot), [*worth_telling(found.ranks), *slow_network(found.ranks)]


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `paceline report`."""
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="RUN_DIR", help="the job's directory on each of its machines"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: NAME.html; - for stdout)")


def _verdict_on(directories: Sequence[Path]) -> StallNotice | None:
    """Returns the fault reported by `paceline analyze`, if any."""
    from paceline.operate.dashboard.job_sample import StallNotice

    _, verdict, late = _diagnose(directories)
    if verdict is None or not verdict.is_fault:
        return None
    return StallNotice(verdict.sentence, verdict.blamed, tuple(slow.sentence for slow in late))


def write_report(options: argparse.Namespace) -> int:
    """Writes an HTML report; returns 0, or 2 if there are no recordings or the file cannot be written."""
    from paceline import __version__
    from paceline.operate.dashboard.directory_collector import NothingRecordedError, dashboard_of
    from paceline.operate.dashboard.report import report

    directories: list[Path] = options.directories
    name = directories[0].resolve().name
    output = options.output or f"{name}.html"
    try:
        picture = dashboard_of(directories, _verdict_on(directories))
        when = time.strftime("%d %B %Y, %H:%M", time.localtime())
        page = report(picture, f"Report of {name}, made on {when} by Paceline {__version__}.")
        if output == "-":
            sys.stdout.buffer.write(page)
        else:
            Path(output).write_bytes(page)
    except (NothingRecordedError, OSError) as error:
        print(f"paceline report: {error}", file=sys.stderr)
        return 2
    if output != "-":
        print(f"{output}: {picture.header.sentence}")
    return 0


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `paceline trace`."""
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIRECTORY", help="the job's directory on each machine"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="default: trace.json")
    parser.add_argument(
        "--torch",
        nargs="*",
        type=Path,
        default=[],
        metavar="FILE",
        help="traces that torch.profiler exported, to show on the same axis",
    )


def write_trace(options: argparse.Namespace) -> int:
    """Writes the trace; returns the exit code."""
    recordings, error_ns = read_aligned(options.directories)
    if not recordings:
        where = " or ".join(map(str, options.directories))
        print(
            f"paceline trace: there are no recordings in {where}; `paceline runs` lists the jobs that have some",
            file=sys.stderr,
        )
        return 1
    trace = trace_of(recordings, error_ns, [_read_profile(path) for path in options.torch])
    options.output.write_text(json.dumps(trace))
    calls = sum(len(recording.calls) for recording in recordings)
    events = sum(len(recording.events) for recording in recordings)
    accuracy = f"; times of different hosts are off by at most {error_ns / 1e6:.3f} ms" if error_ns else ""
    if error_ns is None:
        accuracy = "; hosts are aligned by their time of day, since a launcher did not say how its clock differs"
    print(
        f"{options.output}: {len(recordings)} ranks, {calls} calls, {events} events{accuracy}. Open it in "
        "https://ui.perfetto.dev"
    )
    return 0


def _read_profile(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    profile: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return profile


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `paceline runs`."""
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        help="the parent of the jobs' directories, such as the value of --log-dir (default: PACELINE_RUNS_DIR, or "
        "paceline/runs in XDG_STATE_HOME or ~/.local/state)",
    )
    parser.add_argument("--json", action="store_true", help="print all facts about each job, as lines of JSON")


def show_runs(options: argparse.Namespace) -> int:
    """Prints the list of recorded jobs; returns the exit code."""
    directory = options.directory or runs_directory()
    found = list_runs(directory)
    for run in found:
        facts = {**asdict(run), "directory": str(run.directory), "state": run.state.value}
        print(json.dumps(facts) if options.json else line_of(run))
    if not found and not options.json:
        print(f"There are no jobs in {directory}.")
    return 0


def line_of(run: JobRun) -> str:
    """Formats a job as one line: start time, state, command and directory name."""
    state = run.state.value if run.exit_code in (None, 0) else f"{run.state.value} ({run.exit_code})"
    command = shlex.join(run.command)
    if len(command) > _LONGEST_COMMAND:
        command = f"{command[: _LONGEST_COMMAND - 3]}..."
    return f"{when(run)}  {state:<12}  {command:<{_LONGEST_COMMAND}}  {run.id}"
