"""Parses command lines; explains a mistake in a line or two, with the nearest flag, instead of listing every flag."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors name the mistake, the nearest flag and `--help`, with exit code 2.

    `whole` is the parser of which this one parses a command.
    """

    whole: Parser | None = None

    def error(self, message: str) -> NoReturn:
        """Prints the mistake and ends the process."""
        message = message.removesuffix(", ...")  # argparse names the script's own arguments as required too
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help` for all flags.\n")

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads by the namespace's class
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses as argparse does, but rejects an unknown flag here, where the existing flags are known."""
        words = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._not_known(unknown[0]))
        return found, unknown

    def _get_option_tuples(self, option_string: str) -> list[tuple[argparse.Action, str, str | None]]:
        """Finds what a beginning stands for: the two spellings of one flag do not make it ambiguous."""
        found = super()._get_option_tuples(option_string)
        return list({id(each[0]): each for each in reversed(found)}.values())[::-1]

    def _not_known(self, word: str) -> str:
        from difflib import get_close_matches

        flag = word.split("=")[0]
        known = [spelling for action in self._actions for spelling in action.option_strings if spelling[:2] == "--"]
        near = get_close_matches(flag.replace("_", "-"), known, n=1)
        return f"{flag} is not a flag; did you mean {near[0]}?" if near else f"{flag} is not a flag"
