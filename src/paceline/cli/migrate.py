"""Runs `paceline migrate PATH ...`: the changes go to stdout as a diff, what is to be said about them to stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.migrate.places import Choice
    from paceline.migrate.project import File, Program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file or folder of the program")
    parser.add_argument("--write", action="store_true", help="change the files instead of printing the changes")
    parser.add_argument(
        "--way",
        choices=("auto", "import", "plugin"),
        default="auto",
        help="import: `import paceline as dist`; plugin: torch.distributed with the backend paceline; auto: the latter "
        "if the program uses what is built on torch's groups (default: auto)",
    )


def run(options: argparse.Namespace) -> int:
    """Prints or makes the changes; returns 0, or 2 if files cannot be read or written."""
    from paceline.migrate.names import Way
    from paceline.migrate.project import MissingLibCST, migrate

    try:
        program = migrate(options.paths, None if options.way == "auto" else Way(options.way))
        if not options.write:
            for file in program.files:
                sys.stdout.writelines(_diff(file))
        written = program.write() if options.write else 0
    except (MissingLibCST, OSError) as error:
        print(f"paceline migrate: {error}", file=sys.stderr)
        return 2
    for line in _report(program):
        print(line, file=sys.stderr)
    if options.write:
        print(f"{written} file{'s' * (written != 1)} changed.", file=sys.stderr)
    elif any(file.changes for file in program.files):
        print("Nothing has been changed; --write changes the files.", file=sys.stderr)
    return 0


def _diff(file: File) -> Iterator[str]:
    from difflib import unified_diff  # here, since it takes time and every command imports this module
    from io import StringIO

    before, after = (list(StringIO(text, newline="\n")) for text in (file.before, file.after.text))
    for line in unified_diff(before, after, str(file.path), str(file.path)):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _report(program: Program) -> Iterator[str]:
    """Yields the lines that say what comes over, what is left to do, and the score."""
    from paceline.migrate.places import score

    for path, why in program.unread:
        yield f"{path}: left as it is, since it is no valid Python: {why}"
    for file in program.files:
        come, there_are = score(file.after.places)
        yield f"{file.path}: {come} of {there_are}"
        for place in file.after.places:
            if place.reason is not None:
                yield f"  line {place.line}, {place.what}: to do: {place.reason}"
            elif place.note is not None:
                yield f"  line {place.line}, {place.what}: {place.note}"
    come, there_are = score(program.places())
    if not there_are:
        yield "There is nothing to migrate: no torch.distributed, Horovod or launch command was found."
        return
    yield f"{come} of {there_are} places come over{_way(program.choice)}."


def _way(choice: Choice) -> str:
    if not choice.reason:
        return ""
    return f', with torch.distributed and its backend "paceline": {choice.reason}'
