"""Runs tests that are too slow for the suite, part by part, and prints a table of the results: `make nightly`.

    python tests/nightly.py                 every part
    python tests/nightly.py soak docs       these parts
    python tests/nightly.py --record ...    the results also replace older ones in docs/nightly.md

A part that fails does not stop the others, but the exit code is then 1. If a part requires tools that are missing, the
tools are reported and the part is skipped. The output of each part is written to build/nightly/PART.log.
docs/nightly.md describes the parts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nightly_page import Result, row, table, with_results
from nightly_parts import Part, parts

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "nightly"
PAGE = ROOT / "docs" / "nightly.md"
_LINES_SHOWN = 15  # number of lines printed from a failed part's log
_SUMMARIES = (
    r"^=+ (.*(?:passed|skipped).*) in .* =+$",  # pytest's summary
    r"^(\d+% tests passed.* out of \d+)$",  # ctest's summary
    r"^(paceline-.*\.whl with .*: installed in .*)$",  # the summary of release/check_wheel.py
)


def run(part: Part, logs: Path) -> Result:
    """Runs the commands of a part until one fails or the part's time limit is reached."""
    if reason := part.obstacle():
        return Result(part.name, "skipped", 0.0, reason)
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with open(logs / f"{part.name}.log", "w") as log:
        for command in part.commands:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            left_s = part.limit_s - (time.monotonic() - started)
            failure = _failure_of(command, {**os.environ, **part.environment}, log.fileno(), left_s)
            if failure:
                return Result(part.name, "failed", time.monotonic() - started, failure)
    return Result(part.name, "passed", time.monotonic() - started, _last_summary(logs / f"{part.name}.log"))


def _failure_of(command: Sequence[str], environment: dict[str, str], log: int, limit_s: float) -> str:
    """Runs a command; returns how it failed, or "" if it succeeded. All its processes are killed at the time limit."""
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    except OSError as error:
        return f"`{command[0]}` could not be started: {error.strerror}"
    try:
        code = process.wait(max(0.0, limit_s))
    except subprocess.TimeoutExpired:
        return "it was still running when the time of its part was over, and was killed"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shown = " ".join(command).replace(f"{ROOT}/", "")
    return f"exit code {code} of `{shown}`" if code else ""


def _last_summary(log: Path) -> str:
    """Returns the summary line of pytest, ctest or release/check_wheel.py, or "" if the log contains none."""
    text = log.read_text(errors="replace")
    found = (re.findall(each, text, re.MULTILINE) for each in _SUMMARIES)
    return next(("; ".join(lines) if "installed" in lines[-1] else lines[-1] for lines in found if lines), "")


def chosen(names: Sequence[str], every: Sequence[Part]) -> list[Part]:
    """Returns the parts with these names in the order of `every`, or all parts if there are no names."""
    known = [part.name for part in every]
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"there is no part {', '.join(unknown)}; the parts are {', '.join(known)}")
    return [part for part in every if not names or part.name in names]


def main(arguments: Sequence[str]) -> int:
    """Runs the parts selected by the arguments; returns the exit code."""
    parser = argparse.ArgumentParser(description="Runs what does not fit into the suite.")
    parser.add_argument("parts", nargs="*", help="the names of parts; all of them by default")
    parser.add_argument("--record", action="store_true", help="also write the results to docs/nightly.md")
    given = parser.parse_args(arguments)
    results, every, day = [], parts(ROOT), time.strftime("%d %B %Y", time.gmtime())
    for part in chosen(given.parts, every):
        print(f"==> {part.name}: {part.does}", flush=True)
        load = os.getloadavg()[0]
        results.append(replace(run(part, LOGS), load=load))
        print(f"    {results[-1].verdict} {results[-1].detail}", flush=True)
        if results[-1].verdict == "failed":
            print("\n".join((LOGS / f"{part.name}.log").read_text(errors="replace").splitlines()[-_LINES_SHOWN:]))
        if given.record:
            PAGE.write_text(with_results(PAGE.read_text(), results[-1:], day, [each.name for each in every]))
    print(f"\n{table([row(each, day) for each in results])}")
    return int(any(each.verdict == "failed" for each in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
