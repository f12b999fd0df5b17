"""Runs `paceline top`, from its arguments to the exit code."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="the job's directory, its name in `paceline runs`, or its page's address (default: the latest that runs)",
    )
    parser.add_argument("--once", action="store_true", help="print it once, and end")
    parser.add_argument("--plain", action="store_true", help="plain text, even if Textual is installed")
    parser.add_argument("--every", type=_seconds, default=1.0, metavar="SECONDS", help="how often (default: 1)")


def run(options: argparse.Namespace) -> int:
    """Shows the job until it ends or the user has seen enough; returns 2 if there is none to show."""
    from importlib.util import find_spec

    from paceline.cli.top.client import UnreachableError
    from paceline.cli.top.finding import NoJobError, find
    from paceline.cli.top.lines import lines_of
    from paceline.cli.top.looking import looking_at
    from paceline.cli.top.screen import show

    try:
        look = looking_at(find(options.job))
        look()  # so that a wrong address is told before the screen changes
        is_plain = options.plain or options.once or not sys.stdout.isatty() or not sys.stdin.isatty()
        if not is_plain and find_spec("textual") is not None:
            from paceline.cli.top.app import Top

            Top(look, options.every).run()
        else:
            show(lambda *size: lines_of(look(), *size), options.every, options.once)
    except (NoJobError, UnreachableError) as error:
        print(f"paceline top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds
