"""Runs benchmarks by name, keeps their results, and draws the documentation's tables and pictures from all results.

    python bench/run.py [NAME ... | usual | all] [--results FOLDER]
    python bench/run.py --list

`make bench` runs the names in `usual`, `make bench BENCH="ddp store"` runs the given names, and `make figures` only
draws the tables and pictures. The result of a benchmark that succeeded is kept as NAME.json in `bench/results`. With
--results the results are kept in another folder, and nothing is drawn.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from publish.catalog import RUNS, USUAL
from publish.results import FOLDER

HERE = Path(__file__).resolve().parent


def chosen(names: Sequence[str]) -> list[str]:
    """Returns the selected runs, without duplicates."""
    groups = {"usual": USUAL, "all": tuple(RUNS)}
    found = list(dict.fromkeys(run for name in names for run in groups.get(name, (name,))))
    unknown = [name for name in found if name not in RUNS]
    if unknown:
        raise SystemExit(f"there is no benchmark {', '.join(unknown)}; there are: usual, all, {', '.join(RUNS)}")
    return found


def run(name: str, folder: Path) -> bool:
    """Runs a benchmark and keeps its result; returns True if it succeeded."""
    script, *options = RUNS[name]
    print(f"==> {name}: python bench/{shlex.join([script, *options])}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "result.json")
        done = subprocess.run([sys.executable, str(HERE / script), *options, "--json", str(result)])
        if done.returncode or not result.exists():
            print(f"==> {name} ended with status {done.returncode} and left no result", file=sys.stderr)
            return False
        (folder / f"{name}.json").write_text(result.read_text())
    return True


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("names", nargs="*", metavar="NAME", help="usual, all, or names from --list")
    arguments.add_argument(
        "--results", type=Path, metavar="FOLDER", help="keep the results in FOLDER, and draw nothing"
    )
    arguments.add_argument("--list", action="store_true", help="list the benchmarks")
    options = arguments.parse_args()
    if options.list:
        print("\n".join(f"{name:20} bench/{shlex.join(words)}" for name, words in RUNS.items()))
        return
    folder = options.results or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in chosen(options.names) if not run(name, folder)]
    if options.results is None:
        from publish.pages import draw_all

        for path in draw_all():
            print(f"==> Drew {path}")
    if failed:
        raise SystemExit(f"no result of {', '.join(failed)}")


if __name__ == "__main__":
    main()
