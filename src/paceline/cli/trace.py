"""`paceline trace`: what a job recorded, as a trace for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

from paceline.observe.reading import read_aligned
from paceline.observe.tracing import trace_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `paceline trace`."""
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIRECTORY", help="the job's directory, of each machine"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="default: trace.json")
    parser.add_argument(
        "--torch",
        nargs="*",
        type=Path,
        default=[],
        metavar="FILE",
        help="traces that torch.profiler exported, to be shown on the same axis",
    )


def run(options: argparse.Namespace) -> int:
    """Writes the trace; returns the exit code."""
    recordings, error_ns = read_aligned(options.directories)
    if not recordings:
        where = " or ".join(map(str, options.directories))
        print(
            f"paceline trace: there are no recordings in {where}; `paceline runs` lists the jobs that have some",
            file=sys.stderr,
        )
        return 1
    trace = trace_of(recordings, error_ns, [_profile(path) for path in options.torch])
    options.output.write_text(json.dumps(trace))
    calls, events = sum(len(each.calls) for each in recordings), sum(len(each.events) for each in recordings)
    accuracy = f"; times of different hosts are off by at most {error_ns / 1e6:.3f} ms" if error_ns else ""
    if error_ns is None:
        accuracy = "; hosts are aligned by their time of day, since a launcher did not say how its clock differs"
    print(
        f"{options.output}: {len(recordings)} ranks, {calls} calls, {events} events{accuracy}. Open it in "
        "https://ui.perfetto.dev"
    )
    return 0


def _profile(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    profile: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return profile
