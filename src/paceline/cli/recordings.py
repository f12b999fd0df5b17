"""Commands that read recordings: `paceline runs`, `analyze`, `report` and `trace`."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.operate.diagnosis.chrome_trace import trace_of
from paceline.operate.diagnosis.recording_reader import machines_in, read_aligned
from paceline.operate.diagnosis.runs import JobRun, files_of_job, list_runs, runs_directory, when

if TYPE_CHECKING:
    from paceline.operate.dashboard.aggregator import DashboardAggregator
    from paceline.operate.dashboard.dashboard_state import StragglerEstimate
    from paceline.operate.diagnosis.finding import Diagnosis
    from paceline.operate.diagnosis.postmortem import PostmortemData

_LONGEST_COMMAND = 60
_WELL = (
    "no problem was found: no rank failed, no rank kept others waiting at the end, and none was significantly slower"
)
_WELL_SO_FAR = "no problem was found: no rank has failed, is waiting for another, or is significantly slower"


def add_analyze_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `paceline analyze`."""
    parser.add_argument("directory", metavar="RUN_DIR", help="the directory of the job's recordings and logs")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def analyze(options: argparse.Namespace) -> int:
    """Prints the diagnosis of a job; returns 1 if there is a fault, otherwise 0."""
    from paceline.operate.diagnosis.finding import summary

    directories = [Path(options.directory)]
    job = _diagnose(directories)
    found, verdict = job.postmortem, job.verdict
    verdicts = [*([verdict] if verdict is not None else []), *job.slowdowns]
    if options.json:
        facts = [{"cause": item.cause.name, "blamed": item.blamed, "sentence": item.sentence} for item in verdicts]
        print(json.dumps({"ranks": len(found.ranks), "world_size": found.world_size, "verdicts": facts}))
    else:
        for line in [*summary(found.ranks, found.world_size), *(item.sentence for item in verdicts)]:
            print(line)
        if not verdicts:
            print(_WELL if found.is_over else _WELL_SO_FAR)
    return 1 if verdict is not None and verdict.is_fault else 0


@dataclass(frozen=True)
class _JobDiagnosis:
    """The diagnosis of a job, derived from the job's files."""

    postmortem: PostmortemData
    verdict: Diagnosis | None  # the cause of the job's failure
    slowdowns: tuple[Diagnosis, ...]  # ranks and links that were slow most of the time
    aggregator: DashboardAggregator | None  # data for the report; None if no recording is readable
    what_if: StragglerEstimate | None  # estimated time without the stragglers, if there are any


def _problem_with(directories: Sequence[Path]) -> str | None:
    """Returns an error message if the directories do not belong to a single job, otherwise None."""
    for directory in directories:
        if not directory.is_dir():
            return f"{directory} is not a directory; `paceline runs` lists the directories of your jobs"
        jobs = {run.directory: run.job for run in machines_in([directory])}
        if len(set(jobs.values())) > 1:
            return (
                f"{directory} contains {len(set(jobs.values()))} jobs; specify the directory of one of them, such as "
                f"{min(jobs)}"
            )
    names = ("*.record", "stall-*.json", "error.json")
    if not any(files_of_job(directory, name) for directory in directories for name in names):
        return (
            f"{' and '.join(map(str, directories))} contains no recording (*.record) of a job; `paceline runs` lists "
            "the directories of your jobs, and `paceline run --log-dir DIR` saves the recordings of its workers in DIR"
        )
    return None


def _diagnose(directories: Sequence[Path]) -> _JobDiagnosis:
    """Reads and diagnoses a job, for `paceline analyze` and `paceline report`.

    Raises:
        PacelineError: the directories do not contain the recordings of a single job.
    """
    from paceline.operate.dashboard.aggregator import what_if_of
    from paceline.operate.dashboard.external_collector import NothingRecordedError, aggregate_directories
    from paceline.operate.dashboard.job_sample import StallNotice
    from paceline.operate.diagnosis.postmortem import read_job, verdict_on
    from paceline.operate.diagnosis.slow_links import slow_network
    from paceline.operate.diagnosis.stragglers import describe, find_stragglers, work_before_calls

    if (problem := _problem_with(directories)) is not None:
        raise PacelineError(problem)
    found = read_job(*directories)
    verdict = verdict_on(found)
    network = slow_network(found.ranks)
    notice = None
    if verdict is not None and verdict.is_fault:
        notice = StallNotice(verdict.sentence, verdict.blamed, tuple(link.sentence for link in network))
    aggregator = None
    with contextlib.suppress(NothingRecordedError):
        aggregator = aggregate_directories(directories, notice)
    if aggregator is not None and aggregator.has_steps:
        costs = aggregator.stragglers
    else:  # the program records no steps
        costs = tuple(find_stragglers(work_before_calls(found.ranks)))
    slow = [diagnosis for cost in costs for diagnosis in describe(cost, is_over=found.is_over)]
    what_if = what_if_of(costs, is_over=found.is_over)
    return _JobDiagnosis(found, verdict, (*slow, *network), aggregator, what_if)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `paceline report`."""
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="RUN_DIR", help="the job's directory on each of its machines"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: NAME.html; - for stdout)")


def write_report(options: argparse.Namespace) -> int:
    """Writes an HTML report; returns the exit code."""
    from paceline import __version__
    from paceline.operate.dashboard.report import report

    directories: list[Path] = options.directories
    name = directories[0].resolve().name
    output = options.output or f"{name}.html"
    job = _diagnose(directories)
    if job.aggregator is None:
        where = " and ".join(map(str, directories))
        raise PacelineError(f"no recording in {where} is readable; see `paceline analyze`")
    picture = replace(job.aggregator.state(), what_if=job.what_if)
    when = time.strftime("%d %B %Y, %H:%M", time.localtime())
    page = report(picture, f"Report of {name}, created on {when} by Paceline {__version__}.")
    if output == "-":
        sys.stdout.buffer.write(page)
    else:
        Path(output).write_bytes(page)
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
    problem = _problem_with(options.directories)
    recordings, error_ns = read_aligned(options.directories) if problem is None else ([], None)
    if not recordings:
        where = " or ".join(map(str, options.directories))
        print(f"paceline trace: {problem or f'no recording in {where} is readable'}", file=sys.stderr)
        return 1
    trace = trace_of(recordings, error_ns, [_read_profile(path) for path in options.torch])
    options.output.write_text(json.dumps(trace))
    calls = sum(len(recording.calls) for recording in recordings)
    events = sum(len(recording.events) for recording in recordings)
    accuracy = f"; times of different hosts are off by at most {error_ns / 1e6:.3f} ms" if error_ns else ""
    if error_ns is None:
        accuracy = "; hosts are aligned by their time of day, because a launcher did not report its clock offset"
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
    parser.add_argument("--json", action="store_true", help="print all fields of each job, as lines of JSON")


def show_runs(options: argparse.Namespace) -> int:
    """Prints the list of recorded jobs; returns the exit code."""
    directory = options.directory or runs_directory()
    found = list_runs(directory)
    for run in found:
        facts = {**asdict(run), "directory": str(run.directory), "state": run.state.value}
        print(json.dumps(facts) if options.json else line_of(run))
    if not found and not options.json:
        print(f"No jobs were found in {directory}.")
    return 0


def line_of(run: JobRun) -> str:
    """Formats a job as one line: start time, state, command and directory name."""
    state = run.state.value if run.exit_code in (None, 0) else f"{run.state.value} ({run.exit_code})"
    command = shlex.join(run.command)
    if len(command) > _LONGEST_COMMAND:
        command = f"{command[: _LONGEST_COMMAND - 3]}..."
    return f"{when(run)}  {state:<12}  {command:<{_LONGEST_COMMAND}}  {run.id}"
