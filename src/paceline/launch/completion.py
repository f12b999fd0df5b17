"""Prints what a shell needs to complete `paceline`: its commands, their flags, and the values to choose from."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from paceline.launch.grammar import Parser

SHELLS = ("bash", "zsh", "tcsh")

_BASH = """\
_paceline() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words
    case "${{COMP_WORDS[1]}} $before $word" in
{cases}
    esac
    [ "$COMP_CWORD" -gt 1 ] || words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _paceline paceline
"""
_ZSH = "#compdef paceline\nautoload -U +X bashcompinit && bashcompinit\n"


class CompletionAction(argparse.Action):
    """Prints the script for a shell and ends, without a SCRIPT."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Prints the script and ends the process with code 0."""
        whole = parser.whole if isinstance(parser, Parser) else None
        print(completion(str(values), {"run": parser} if whole is None else commands_of(whole)), end="")
        parser.exit()


def commands_of(whole: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of a command line's commands, by name."""
    return {
        name: parser
        for action in whole._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, parser in action.choices.items()
    }


def completion(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Returns the script for one of `SHELLS`. Where there is nothing to choose from, files are completed."""
    flags = {command: _flags(parser) for command, parser in commands.items()}
    names = " ".join(commands)
    if shell == "tcsh":
        every = " ".join(sorted({flag[2:] for of in flags.values() for flag in of}))
        return f"complete paceline 'p/1/({names})/' 'c/--/({every})/'\n"
    cases = [
        f'    "{command} {flag} "*) words="{" ".join(values)}" ;;'
        for command, of in flags.items()
        for flag, values in of.items()
        if values
    ]
    cases += [f'    "{command} "*" -"*) words="{" ".join(of)}" ;;' for command, of in flags.items()]
    bash = _BASH.format(cases="\n".join(cases), commands=names)
    return _ZSH + bash if shell == "zsh" else bash


def _flags(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Returns the flags, in their spelling with dashes, and the values to choose from."""
    return {
        next(spelling for spelling in action.option_strings if spelling[:2] == "--"): list(
            map(str, action.choices or ())
        )
        for action in parser._actions
        if action.option_strings and action.help is not argparse.SUPPRESS
    }
