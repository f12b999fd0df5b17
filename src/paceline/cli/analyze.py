"""Runs `paceline analyze RUN_DIR`, which says from a job's files what went wrong and for whom the others waited."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("directory", metavar="RUN_DIR", help="where the job's recordings and logs are")
    parser.add_argument("--json", action="store_true", help="print the same for programs")


def run(options: argparse.Namespace) -> int:
    """Prints the analysis; returns 0 if nothing is wrong, 1 if something is, and 2 if there is nothing to read."""
    from paceline.observe.afterwards import remains
    from paceline.observe.diagnosis import diagnose
    from paceline.observe.stragglers import worth_telling
    from paceline.observe.summary import summary
    from paceline.observe.transfers import slow_network

    if not Path(options.directory).is_dir():
        print(f"paceline analyze: {options.directory} is not a directory", file=sys.stderr)
        return 2
    found = remains(options.directory)
    if not found.files:
        print(
            f"paceline analyze: {options.directory} has no recording (*.record); `paceline run --log-dir DIR` keeps "
            "those of its workers in DIR",
            file=sys.stderr,
        )
        return 2
    verdict = diagnose(found.scene)
    late = [*worth_telling(found.ranks), *slow_network(found.ranks)]
    verdicts = [*([verdict] if verdict is not None else []), *late]
    if options.json:
        told = [{"cause": each.cause.name, "blamed": each.blamed, "sentence": each.sentence} for each in verdicts]
        print(json.dumps({"ranks": len(found.ranks), "world_size": found.world_size, "verdicts": told}))
    else:
        for line in [*summary(found.ranks, found.world_size), *(each.sentence for each in verdicts)]:
            print(line)
        if not verdicts:
            print("nothing is wrong: no rank failed, none waits for another, and none was late as a rule")
    return 1 if verdict is not None and verdict.is_fault else 0
