"""Runs `paceline report RUN_DIR ...`, which writes one file of HTML with all that a job's directories show."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.observe.live.sample import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="RUN_DIR", help="the job's directory, of each of its machines"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="what to write (default: NAME.html; - for stdout)")


def _verdict_on(directories: Sequence[Path]) -> Verdict | None:
    """Returns what `paceline analyze` says of the job, if something was wrong with it."""
    from paceline.observe.afterwards import remains
    from paceline.observe.diagnosis import diagnose
    from paceline.observe.live.sample import Verdict
    from paceline.observe.stragglers import worth_telling
    from paceline.observe.transfers import slow_network

    found = remains(*directories)
    verdict = diagnose(found.scene)
    late = tuple(each.sentence for each in (*worth_telling(found.ranks), *slow_network(found.ranks)))
    if verdict is not None and verdict.is_fault:
        return Verdict(verdict.sentence, verdict.blamed, late)
    return None


def run(options: argparse.Namespace) -> int:
    """Writes the report; returns 0, or 2 if there is nothing to report on or no place for it."""
    from paceline import __version__
    from paceline.observe.live.archive import NothingRecordedError, picture_of
    from paceline.observe.live.assets import report

    directories: list[Path] = options.directories
    name = directories[0].resolve().name
    output = options.output or f"{name}.html"
    try:
        picture = picture_of(directories, _verdict_on(directories))
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
