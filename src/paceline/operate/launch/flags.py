"""Command-line flags: the table of flags for `paceline run`, the command-line parser, and Tab completion.

The table contains torchrun's flags in both spellings, with their PET_* variables, and Paceline's own flags. If the
command line is invalid, the parser prints one or two lines that suggest the most similar flag, instead of listing all
flags.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from paceline.comm.security.secret import LEVELS
from paceline.errors import PacelineError
from paceline.operate.launch.elastic_options import Chaos
from paceline.operate.launch.option_types import (
    parse_backend,
    parse_exports,
    parse_from_0,
    parse_from_1,
    parse_modules,
    parse_nodes,
    parse_port,
    parse_rank_or_none,
    parse_ranks,
    parse_seconds,
    parse_settings,
    parse_signals,
    parse_streams,
    parse_switch,
    parse_words,
    parse_workers,
    refuse_logs_specs,
)
from paceline.operate.launch.workers.environment import parse_libraries

SHELLS = ("bash", "zsh", "fish", "tcsh")
_FILES = frozenset({"SCRIPT", "PATH", "OTHER", "FILE", "..."})  # argument names for which file names are completed
_DIRECTORIES = frozenset({"RUN_DIR", "DIRECTORY", "DIR", "JOB"})
_WORD = re.compile(r"[A-Za-z][\w-]*")


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors explain the mistake, suggest the most similar flag, and point to `--help`.

    On an error, the program exits with code 2.
    """

    whole: Callable[[], argparse.ArgumentParser] | None = None  # creates the parser for all commands

    def error(self, message: str) -> NoReturn:
        """Prints an error message and exits."""
        message = message.removesuffix(", ...")  # argparse also lists the script's own arguments as required
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help` for all flags.\n")

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads by the namespace's class
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses like argparse, but rejects unknown flags here, where the command's own flags are known."""
        words = sys.argv[1:] if args is None else list(args)
        self._ambiguous: dict[str, str] = {}
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            word = unknown[0]
            flags = self._ambiguous.get(word)
            self.error(f"ambiguous option: {word} could match {flags}" if flags else self._not_known(word))
        return found, unknown

    def _get_option_tuples(self, option_string: str) -> list[tuple[argparse.Action, str, str | None]]:
        """Returns the flag that matches an abbreviation. The two spellings of a flag count as one match.

        If several flags match, the word counts as unknown, because it may be an argument of the script: argparse calls
        this method for all words, and would not accept an ambiguous one in any position.
        """
        found = super()._get_option_tuples(option_string)
        matches = list({id(match[0]): match for match in reversed(found)}.values())[::-1]
        if len(matches) > 1:
            self._ambiguous[option_string] = ", ".join(match[1] for match in matches)
            return []
        return matches

    def _not_known(self, word: str) -> str:
        from difflib import get_close_matches

        flag = word.split("=")[0]
        known = [spelling for action in self._actions for spelling in action.option_strings if spelling[:2] == "--"]
        near = get_close_matches(flag.replace("_", "-"), known, n=1)
        return f"{flag} is not a flag; did you mean {near[0]}?" if near else f"{flag} is not a flag"


class MissingShtabError(PacelineError):
    """Raised if shtab, which generates the scripts, is not installed."""


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Returns a script with which a shell (one of `SHELLS`) completes commands, flags, choices and file names.

    The parser is that of the whole command line. It cannot be used to parse arguments afterwards.

    Raises:
        MissingShtabError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise MissingShtabError("shtab, which generates the script, is not installed: pip install shtab") from error
    for command in [parser, *_subparsers(parser)]:
        for action in command._actions:
            # Omits torchrun's spellings with underscores, which are accepted but need not be suggested.
            action.option_strings = [flag for flag in action.option_strings if "_" not in flag]
            if action.nargs != 0 and action.choices is None and (kind := _kind_of(action)) is not None:
                vars(action)["complete"] = getattr(shtab, kind)  # shtab reads this attribute
    return str(shtab.complete(parser, shell))


def _kind_of(action: argparse.Action) -> str | None:
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return "FILE" if name in _FILES else "DIRECTORY" if name in _DIRECTORIES else None


def _subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found: list[argparse.ArgumentParser] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, command in action.choices.items():
                command.description = helps.get(name)  # shells show the description in a list of commands
                found += [command, *_subparsers(command)]
    return found


class CompletionAction(argparse.Action):
    """Action that prints the completion script for a shell and exits, even if the positional SCRIPT is missing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Prints the script and exits with code 0."""
        whole = parser.whole if isinstance(parser, Parser) else None
        try:
            script = completion_script(str(values), parser if whole is None else whole())
        except MissingShtabError as error:
            parser.error(f"{option_string}: {error}")
        print(script)
        parser.exit()


@dataclass(frozen=True)
class Flag:
    """A flag; `parse` is None for switches. If `variable` is true, PET_<NAME> provides the default, as in torchrun."""

    name: str
    help: str
    parse: Callable[[str], object] | None = None
    default: str | None = None
    metavar: str = "N"
    short: str | None = None
    choices: Sequence[str] | None = None
    variable: bool = True
    ours: bool = False
    action: type[argparse.Action] | None = None

    @property
    def dest(self) -> str:
        """The attribute name in the parsed options."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        """All accepted spellings: short, with dashes, and with underscores."""
        long = list(dict.fromkeys((f"--{self.name}", f"--{self.dest}")))
        return [self.short, *long] if self.short else long


FLAGS = (
    # where the job runs
    Flag("nnodes", "the number of machines, or a range within which machines join and leave", parse_nodes, "1",
         "N|MIN:MAX"),
    Flag("nproc-per-node", "workers on this machine; gpu: one per GPU, cpu: one per core, auto: gpu if there are GPUs, "
         "else cpu", parse_workers, "1", "N|auto|gpu|cpu"),
    Flag("node-rank", "this machine's number, if machines have fixed numbers (--rdzv-backend static)", parse_from_0),
    Flag("master-addr", "the address of machine 0, which hosts the rendezvous", str, metavar="ADDRESS"),
    Flag("master-port", "the port on machine 0; on a single machine, the workers' MASTER_PORT (default: a free one)",
         parse_port, metavar="PORT"),
    Flag("local-addr", "the address at which the other machines reach this one (default: the source address of the "
         "route to the rendezvous)", str, metavar="ADDRESS"),
    Flag("rdzv-backend", "static: numbered machines; c10d: machines in any order", parse_backend, "static",
         "NAME"),
    Flag("rdzv-endpoint", "the address of the rendezvous; the machine with this address hosts it", str, "",
         "HOST:PORT"),
    Flag("rdzv-id", "the job's name, the same on all machines", str, "none", "NAME"),
    Flag("rdzv-conf", "join_timeout, last_call_timeout, heartbeat_timeout, return_timeout (seconds), is_host (0 or 1)",
         parse_settings, "", "KEY=VALUE,..."),
    Flag("standalone", "use one machine, regardless of the other flags and the environment"),
    # restarts
    Flag("max-restarts", "the maximum number of restarts after failures (default: 0); with --elastic, of replacements "
         "on each machine (default: unlimited)", parse_from_0),
    Flag("monitor-interval", "accepted and ignored: the launcher detects the exit of a worker immediately",
         parse_seconds, "0.1", "SECONDS"),
    Flag("shutdown-timeout", "seconds from the stop signal to SIGKILL (default: 30, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
         parse_seconds, metavar="SECONDS"),
    Flag("signals-to-handle", "signals that end the job; the launcher passes them on to the workers", parse_signals,
         "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "NAMES"),
    # what the job runs
    Flag("module", "SCRIPT is a module, as for python -m", short="-m"),
    Flag("no-python", "SCRIPT is a program, not a Python script"),
    Flag("run-path", "SCRIPT is run by runpy.run_path"),
    Flag("start-method", "spawn: a new interpreter for each worker; fork, forkserver: forks of an interpreter that has "
         "imported torch; auto: forks if SCRIPT imports torch and forking is possible", str, "auto", "METHOD",
         choices=("auto", "spawn", "fork", "forkserver")),
    Flag("role", "ROLE_NAME of the workers", str, "default", "NAME"),
    Flag("virtual-local-rank", "each worker sees only its own GPU, as number 0, and LOCAL_RANK=0"),
    # output
    Flag("log-dir", "keep the workers' output in DIR/RUN_ID/attempt_N/RANK/", str, metavar="DIR"),
    Flag("redirects", "streams that go only to files: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank: 0:1,1:2",
         parse_streams, "0", "STREAMS", short="-r"),
    Flag("tee", "streams that go to files and to the console, in the form of --redirects", parse_streams, "0",
         "STREAMS", short="-t"),
    Flag("local-ranks-filter", "the local ranks that are shown on the console", parse_ranks, "", "0,1,..."),
    Flag("log-line-prefix-template", "prefix of each line on the console; ${role_name}, ${local_rank}, ${rank} and "
         "${hostname} are replaced (default: '[rank ${rank}] ', or TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE)",
         str, "", "TEMPLATE"),
    Flag("duplicate-stdout-filters", "lines with one of these words also go to filtered_stdout.log", parse_words, "",
         "WORDS"),
    Flag("duplicate-stderr-filters", "the same for stderr, to filtered_stderr.log", parse_words, "", "WORDS"),
    Flag("event-log-handler", "console: print a line of JSON to stderr for each start, failure and end", str, "null",
         "NAME", choices=("null", "console")),
    Flag("logs-specs", "torchrun's plug-ins for logs; refused, with the flags to use instead", refuse_logs_specs,
         metavar="NAME", variable=False),
    # cores
    Flag("numa-binding", "bind each worker to the cores of a NUMA node, socket or L3 cache, or to cores of its own",
         str, metavar="MODE", choices=("node", "socket", "exclusive", "core-complex"), variable=False),
    Flag("no-pin", "do not bind workers to cores (by default each has cores of its own)", ours=True),
    # elastic training
    Flag("elastic", "replace workers that die, while the others continue", ours=True),
    Flag("min-workers", "with --elastic: the minimum number of workers (default: 1)", parse_from_1, ours=True),
    Flag("preload", "with --elastic: modules to import once, before workers are forked, so that replacements start "
         "sooner", parse_modules, "", "MODULE,...", ours=True),
    Flag("chaos", "with --elastic: kill or stop random workers at random intervals with these means; for tests",
         Chaos.parse, metavar="kill:2s,stop:5s,seed=7", ours=True),
    # connections
    Flag("security", "encrypt: encrypt all connections between machines; auth: only authenticate them; none: neither "
         "(default: PACELINE_SECURITY, or else encryption where an address is public)", str, metavar="LEVEL",
         choices=LEVELS, variable=False, ours=True),
    Flag("insecure", "allow --security none between machines, on a network that only this job uses", variable=False,
         ours=True),
    Flag("port", "the single TCP port of each machine, through which the others reach all of its listeners (default: "
         "PACELINE_PORT, or else each listener has its own port)", parse_port, metavar="PORT", ours=True),
    # machines by ssh
    Flag("hosts", "start the launchers on these machines by ssh: a list, or a host file of MPI", str,
         metavar="HOST:N,...|FILE", short="-H", ours=True),
    Flag("ssh", "with --hosts: the ssh command to use, with its options", str, "ssh", "COMMAND", ours=True),
    Flag("remote-python", "with --hosts: the interpreter on the other machines (default: this one's path)", str,
         metavar="PATH", ours=True),
    Flag("remote-dir", "with --hosts: the directory on the other machines (default: this one's path)", str,
         metavar="PATH", ours=True),
    Flag("export", "with --hosts: variables that the workers on the other machines also get", parse_exports, "",
         "NAME,NAME=VALUE,...", ours=True),
    # live page
    Flag("dash", "serve a live page of the job on this machine, for this user only (needs paceline[dash])", ours=True),
    Flag("dash-port", "with --dash: the page's port on loopback (default: a free one)", parse_port,
         metavar="PORT", ours=True),
    Flag("dash-socket", "with --dash: a Unix socket to use instead of a port", str, metavar="PATH", ours=True),
    Flag("dash-prefix", "with --dash: the path under which a proxy serves the page", str, "", "PATH", ours=True),
    Flag("dash-host", "with --dash: the host names under which a proxy serves the page", str, "", "NAMES", ours=True),
    Flag("dash-actions", "with --dash: the page may also act: capture the stacks of all ranks", ours=True),
    # miscellaneous
    Flag("compat", "torch: calls of torch.distributed on CPU tensors use Paceline's engine, whatever backend the "
         "script specifies; horovod: `import horovod.torch` is paceline.horovod", parse_libraries, "", "torch,horovod",
         variable=False, ours=True),
    Flag("stall-after", "explain calls that take longer: which rank is missing, and why; 0: never", parse_seconds, "15",
         "SECONDS", variable=False, ours=True),
    Flag("stdin", "the rank that reads the launcher's stdin, or none; the other ranks' stdin is empty",
         parse_rank_or_none, "0", "RANK|none", ours=True),
    Flag("print-completion", "print a completion script for this shell, and exit", str,
         metavar="SHELL", choices=SHELLS, variable=False, action=CompletionAction),
    Flag("dry-run", "print the workers that would start, with their variables, and exit", variable=False, ours=True),
    Flag("print-token", "host the rendezvous and print the token with which other machines join", variable=False,
         ours=True),
)  # fmt: skip


def is_flag(word: str) -> bool:
    """Returns True if a word is a flag or an abbreviation of a flag, with or without a value."""
    name = word.split("=")[0]
    return any(flag.startswith(name) if name.startswith("--") else flag == name[:2] for flag in _spellings())


def flags_after_script(script: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yields a warning if the script's arguments contain launcher flags that the script's source does not mention."""
    own = {flag for flag in _spellings() if flag.startswith("--")}
    before_dashes = arguments[: arguments.index("--")] if "--" in arguments else arguments
    found = [name for word in before_dashes if (name := word.split("=")[0]) in own]
    if found and (text := _text_of(script)):
        found = [name for name in found if not {name[2:], name[2:].replace("-", "_")} & set(_WORD.findall(text))]
    if found:
        flags = ", ".join(dict.fromkeys(found))
        yield (
            f"the script receives {flags}, although the launcher has flags with these names: put the launcher's flags "
            f"before the script, as in `paceline run {found[0]} ... {script}`"
        )


def _text_of(script: str) -> str:
    try:
        with open(script, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):  # the script is a module, a directory, or a compiled file
        return ""


def _spellings() -> list[str]:
    return [spelling for flag in FLAGS for spelling in flag.spellings]


class VariableText(str):
    """The value of a PET_* variable, with the variable's name for error messages."""

    name: str

    @classmethod
    def of(cls, flag: Flag, environment: Mapping[str, str]) -> VariableText | None:
        """Returns the value of a flag's variable, or None if the variable is not set."""
        name = f"PET_{flag.dest.upper()}"
        if name not in environment:
            return None
        text = cls(environment[name])
        text.name = name
        return text


def _value(parse: Callable[[str], object], choices: Sequence[str] | None, text: str) -> object:
    """Parses a value from the command line or a variable; checks a variable's choices, because argparse does not."""
    if not isinstance(text, VariableText):
        return parse(text)
    try:
        if choices is not None and text not in choices:
            raise argparse.ArgumentTypeError(f"{str(text)!r} is not one of {', '.join(choices)}")
        return parse(str(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (the value of the environment variable {text.name})") from None


def add_flags(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Adds all flags to a parser, with defaults from PET_* variables."""
    groups = {
        False: parser.add_argument_group("torchrun's flags (--a-b or --a_b; PET_A_B in the environment)"),
        True: parser.add_argument_group("Paceline's own flags"),
    }
    for flag in FLAGS:
        given = VariableText.of(flag, environment) if flag.variable else None
        group = groups[flag.ours]
        if flag.parse is None:
            switch = group.add_argument(
                *flag.spellings, action="store_true", default=False if given is None else given, help=flag.help
            )
            switch.type = partial(_value, parse_switch, None)  # argparse converts a default that is text
        else:
            group.add_argument(
                *flag.spellings,
                type=partial(_value, flag.parse, flag.choices),
                default=flag.default if given is None else given,
                metavar=flag.metavar,
                choices=flag.choices,
                action=flag.action or "store",
                help=flag.help if flag.default in (None, "") else f"{flag.help} (default: {flag.default})",
            )
