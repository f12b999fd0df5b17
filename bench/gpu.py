"""Checks that Paceline and torch.distributed produce the same results on this machine's GPUs.

    python bench/gpu.py [--device cuda|fake|cpu] [--ranks N] [--steps NAME ...] [--budget-s 600]
                        [--at-once N] [--json FILE] [--log FILE] [--list]

Runs the steps one at a time, each with its own ranks and a time limit, and continues after failures. The first steps
check that the machine and torch's own NCCL work. The next steps compare Paceline with torch.distributed: collectives,
streams, training, sharding, checkpoints. The last steps test failures, graphs and speed. Ranks share a GPU if there are
fewer GPUs than ranks. Prints a line for each step and a table at the end; everything else is written to the log. The
exit status is the number of steps that failed. `make gpu` runs this script.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

# before bench, because both contain a module named `hosts`
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from report import keep

if TYPE_CHECKING:
    from gpu_cases.catalog import Step

HERE = Path(__file__).resolve().parent

OK, FAILED, TIMEOUT, LEFT_OUT = "ok", "failed", "timeout", "left out"
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Failed|Exit|Timeout\w*)\b.*", re.MULTILINE)
_SUITE_SHARE = 0.25  # share of the budget that is reserved for tests/gpu
_TRAINING_ROUNDS = 20
ALONE = ("failures", "speed")  # sections with measured times, which would be distorted by concurrent steps


@dataclass
class Outcome:
    """The result of a step.

    Attributes:
        name: The name of the step.
        result: "ok", "failed", "timeout" or "left out" (skipped).
        seconds: The duration of the step.
        error: The first line of the step's error, or the reason why the step was skipped.
        figures: The return value of the step's program.
    """

    name: str
    result: str
    seconds: float = 0.0
    error: str = ""
    figures: object = None

    @property
    def row(self) -> dict[str, object]:
        return {
            "step": self.name,
            "result": self.result,
            "s": round(self.seconds, 2),
            "figures": _spelled(self.figures),
            "error": self.error,
        }


@dataclass
class Run:
    """One run of this script: the selected steps, their outcomes, and the log."""

    options: argparse.Namespace
    ends_at: float
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    @property
    def over(self) -> str:
        return f"the {self.options.budget_s:.0f} s were over"

    def is_chosen(self, name: str) -> bool:
        patterns = self.options.steps
        return not patterns or any(fnmatch.fnmatchcase(name, f"*{each}*") for each in patterns)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        say(f"{outcome.result:8} {outcome.seconds:6.1f} s  {outcome.name}  {_spelled(outcome.figures)}{outcome.error}")


def _spelled(figures: object) -> str:
    if not isinstance(figures, dict):
        return ""
    parts = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    ]
    return ", ".join(parts)


def log(text: str) -> None:
    """Prints lines to the log, or to the terminal if there is no log."""
    os.write(1, f"{text}\n".encode())


def say(text: str) -> None:
    """Prints lines to the terminal and to the log."""
    log(text)
    if _terminal is not None:
        os.write(_terminal, f"{text}\n".encode())


_terminal: int | None = None


@contextlib.contextmanager
def logged(path: str | None) -> Iterator[None]:
    """Redirects all output of this process and of its ranks to a file, except the lines printed by `say`."""
    global _terminal
    if path is None:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    _terminal = os.dup(1)
    errors = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(_terminal, 1)
        os.dup2(errors, 2)
        os.close(_terminal)
        os.close(errors)
        _terminal = None


def first_line(text: str) -> str:
    """Returns the line of a traceback that contains the exception, or the first line if there is no such line."""
    found = next((each for each in _EXCEPTION.finditer(text) if "RankFailed: " not in each[0]), None)
    line = found[0] if found else text.strip().split("\n")[0]
    rank = re.search(r"^(?:world.RankFailed: )?(rank \d+) ", text)
    return f"{rank[1]}: {line}"[:300] if rank and found else line[:300]


_starting = threading.Lock()  # only one thread at a time may use the server that forks the ranks


def run_step(step: Step, run: Run) -> Outcome:
    """Runs the program of a step on its own ranks."""
    from gpu_cases.catalog import ONE
    from gpu_cases.session import BACKENDS, Setting
    from world import RankFailed, Ranks

    options = run.options
    size = 1 if step.ranks == ONE else options.ranks
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        backend = step.backend or options.backend or BACKENDS[options.device]
        setting = Setting(options.device, backend, folder, min(1.0, options.budget_s / 600), step.variables)
        limit_s = min(step.limit_s, options.budget_s / 5)
        is_cut = run.left_s < limit_s
        limit_s = round(max(1.0, run.left_s) if is_cut else limit_s, 1)
        try:
            with _starting:
                world = Ranks(size).start(step.program, setting)
            with world:
                answers = world.join(limit_s, expect_dead={size - 1} if step.dies and size > 1 else ())
        except RankFailed as error:
            log(str(error))
            result = TIMEOUT if "did not finish within" in str(error) else FAILED
            if result == TIMEOUT and is_cut:
                return Outcome(step.name, LEFT_OUT, time.monotonic() - started, run.over)
            return Outcome(step.name, result, time.monotonic() - started, first_line(str(error)))
    return Outcome(step.name, OK, time.monotonic() - started, figures=answers[0])


def run_in_turn(chosen: list[Step], run: Run, count: int, measured: dict[str, list[dict[str, object]]]) -> None:
    """Runs steps, several in parallel if requested, and appends their outcomes in the order of the steps."""

    def attempt(step: Step) -> Outcome:
        if count < step.least:
            return Outcome(step.name, LEFT_OUT, 0.0, f"there are {count} devices, and it needs {step.least}")
        if run.left_s < 2:
            return Outcome(step.name, LEFT_OUT, 0.0, run.over)
        log(f"\n==== {step.name}")
        return run_step(step, run)

    for alone, group in itertools.groupby(chosen, lambda step: step.section in ALONE):
        with ThreadPoolExecutor(1 if alone else run.options.at_once) as threads:
            for outcome in threads.map(attempt, list(group)):
                if isinstance(outcome.figures, list):
                    name = outcome.name.partition(" on ")[0].removeprefix("speed: ")
                    measured.setdefault(name, []).extend(outcome.figures)
                run.add(outcome)


def command(run: Run, name: str, words: list[str], limit_s: float, folder: Path) -> Outcome:
    """Runs a separate program, whose output is written to the log."""
    started = time.monotonic()
    try:
        done = subprocess.run(words, cwd=folder, timeout=max(1.0, min(limit_s, run.left_s)), stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Outcome(name, TIMEOUT, time.monotonic() - started, f"it took more than {limit_s:.0f} s")
    seconds = time.monotonic() - started
    if done.returncode:
        return Outcome(name, FAILED, seconds, f"it ended with status {done.returncode}; see the log")
    return Outcome(name, OK, seconds)


def suite(run: Run) -> list[Outcome]:
    """Runs `tests/gpu`; returns an outcome for each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "--timeout", "60", "-p", "no:cacheprovider"]
        whole = command(
            run, "tests/gpu", [*words, f"--junitxml={report}"], _SUITE_SHARE * run.options.budget_s, HERE.parent
        )
        outcomes = []
        for case in xml.etree.ElementTree.parse(report).iter("testcase") if report.exists() else ():
            broken = case.find("failure") if case.find("failure") is not None else case.find("error")
            skipped = case.find("skipped")
            text = (broken.text or "") if broken is not None else ""
            texts = re.sub(r"^E +", "", "\n".join(line for line in text.split("\n") if line[:2] == "E "), flags=re.M)
            result = FAILED if broken is not None else LEFT_OUT if skipped is not None else OK
            error = first_line(texts or text) if broken is not None else ""
            if skipped is not None:
                error = str(skipped.get("message", ""))
            outcomes.append(Outcome(f"tests/gpu: {case.get('name')}", result, float(case.get("time", 0)), error))
    if whole.result == TIMEOUT or not outcomes:
        outcomes.append(
            whole if outcomes or whole.result != OK else Outcome("tests/gpu", FAILED, whole.seconds, "no test")
        )
    return outcomes


def training_speed(run: Run, tables: list[dict[str, object]]) -> Outcome:
    """Runs `bench/nccl.py` and adds its table to the result."""
    import json

    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "nccl.json")
        rounds = max(3, round(_TRAINING_ROUNDS * min(1.0, run.options.budget_s / 600)))
        words = [sys.executable, "nccl.py", "--rounds", str(rounds), "--json", str(kept)]
        outcome = command(run, "speed: a training step", words, 120, HERE)
        if outcome.result == OK and kept.exists():
            rows = json.loads(kept.read_text())["tables"][0]["rows"]
            tables.append({"title": "A training step on one GPU, bfloat16", "case": "training step", "rows": rows})
            outcome.figures = rows[0]
    return outcome


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "fake", "cpu"), default="cuda", help="the type of device")
    parser.add_argument("--backend", help="Paceline's backend; by default nccl for CUDA, otherwise paceline")
    parser.add_argument(
        "--ranks", type=int, help="number of ranks in multi-rank steps; by default one per GPU, at least 2"
    )
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="run only steps whose name contains one of these")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=600,
        help="time limit for all steps, in seconds; below 600, steps measure less",
    )
    parser.add_argument("--at-once", type=int, help="number of concurrent steps, except timed steps; by default 1 to 4")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--log", metavar="FILE", help="write the ranks' output to FILE")
    parser.add_argument("--list", action="store_true", help="list the steps")
    return parser.parse_args(words)


def run_all(run: Run) -> list[dict[str, object]]:
    """Runs the selected steps; returns the tables of the result."""
    import torch
    from gpu_cases.catalog import steps
    from gpu_cases.facts import facts, topology
    from world import Ranks

    options = run.options
    on_cuda = options.device == "cuda"
    log(topology())
    known = facts()
    for row in known:
        say(f"{row['fact']}: {row['value']}")
    tables: list[dict[str, object]] = [{"title": "The machine", "case": "machine", "rows": known}]
    count = torch.cuda.device_count() if on_cuda else 2
    options.ranks = options.ranks or max(2, count)
    options.at_once = options.at_once or max(1, min(4, len(os.sched_getaffinity(0)) // 4))
    if on_cuda and not count:
        run.add(Outcome("health: a GPU", FAILED, 0.0, "torch sees no GPU here"))
        return tables
    if options.device == "fake":
        import fake_device

        fake_device.build()
    Ranks(1)(os.getpid)  # starts the process that imports torch, from which all ranks are forked
    chosen = [step for step in steps() if run.is_chosen(step.name) and options.device in step.devices]
    health = [step for step in chosen if step.section == "health"]
    measured: dict[str, list[dict[str, object]]] = {}
    run_in_turn(health, run, count, measured)
    if on_cuda and run.is_chosen("tests/gpu"):
        for outcome in suite(run):
            run.add(outcome)
    run_in_turn([step for step in chosen if step.section != "health"], run, count, measured)
    if on_cuda and run.is_chosen("speed: a training step") and run.left_s > 10:
        run.add(training_speed(run, tables))
    tables += [{"title": name, "case": name, "rows": rows} for name, rows in measured.items()]
    return tables


def note(options: argparse.Namespace, machine: list[dict[str, str]]) -> str:
    """Returns a sentence that states the number of ranks and the GPUs used."""
    known = {row["fact"]: row["value"] for row in machine}
    if options.device != "cuda":
        return f"{options.ranks} ranks."
    return f"{options.ranks} ranks on {known['GPUs']} GPU ({known.get('GPU', 'of an unknown kind')})."


def main() -> None:
    options = parse()
    if options.list:
        from gpu_cases.catalog import steps

        print("\n".join(["tests/gpu", *(step.name for step in steps()), "speed: a training step"]))
        return
    run = Run(options, time.monotonic() + options.budget_s)
    with logged(options.log):
        tables = run_all(run)
        rows = [outcome.row for outcome in run.outcomes]
        tables.insert(1, {"title": "Steps", "case": "steps", "rows": rows})
        width = max((len(outcome.name) for outcome in run.outcomes), default=4)
        say("")
        for outcome in run.outcomes:
            say(f"| {outcome.name:{width}} | {outcome.result:8} | {outcome.seconds:6.1f} | {outcome.error[:150]} |")
        counts = {kind: sum(o.result == kind for o in run.outcomes) for kind in (OK, FAILED, TIMEOUT, LEFT_OUT)}
        say(", ".join(f"{number} {kind}" for kind, number in counts.items()))
        if options.json:
            keep(tables, options.json, note(options, tables[0]["rows"]))
    sys.exit(min(100, counts[FAILED] + counts[TIMEOUT]))


if __name__ == "__main__":
    main()
