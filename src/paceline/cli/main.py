"""The `paceline` command line: its parser, the dispatch of subcommands, and the short subcommands.

`run` and `join` are in `operate/launch/command.py`. Longer subcommands are in separate modules and are imported only
when they run, because the imports in this module delay the start of every job.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import platform
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.errors import PacelineError, printable
from paceline.linux import interrupts_raised
from paceline.operate.launch.command import add_run_arguments, run
from paceline.operate.launch.flags import SHELLS, Parser, completion_script, is_flag

if TYPE_CHECKING:
    from paceline.interop.migrate.project import MigratedProgram, ProgramFile


_CHECKPOINT_PATH_HELP = "a checkpoint, or a directory of checkpoints, whose newest complete one is used"
_ON_X86 = {"avx512": "AVX-512", "avx2": "AVX2", "baseline": "SSE2"}
_ON_ARM = {"baseline": "NEON"}


def _add_join_arguments(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    parser.add_argument(
        "token",
        metavar="TOKEN",
        help="- prompts for the token of `paceline run --print-token`, or reads it from stdin; "
        "other users could see it as an argument",
    )
    add_run_arguments(parser, environment)


def _add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspecting = commands.add_parser(
        "inspect",
        help="list the checkpoints in a directory, or the contents of one",
        description="Lists the checkpoints in a directory, with the faults of damaged ones, or the tensors and values "
        "of one checkpoint. It also reads files written by torch.save and torch's distributed checkpoints.",
    )
    inspecting.add_argument("path", metavar="PATH", help="a directory of checkpoints, or a checkpoint")
    inspecting.add_argument("--json", action="store_true", help="print the result as JSON")
    verifying = commands.add_parser(
        "verify",
        help="compare all bytes with their digests",
        description="Reads every byte of a checkpoint, or of all checkpoints in a directory, and reports damage. The "
        "exit code is 1 if there is any, and 2 if there is no checkpoint.",
    )
    verifying.add_argument("path", metavar="PATH", help="a directory of checkpoints, or a checkpoint")
    comparing = commands.add_parser(
        "diff",
        help="show the tensors and values in which two checkpoints differ",
        description="Compares two checkpoints, which may have been saved by different numbers of ranks. The exit code "
        "is 0 if they are equal, 1 if they differ, and 2 if one cannot be read.",
    )
    comparing.add_argument("first", metavar="PATH", help=_CHECKPOINT_PATH_HELP)
    comparing.add_argument("second", metavar="OTHER", help="likewise")
    comparing.add_argument("--only", metavar="NAME", help="compare only this entry of the state")
    exporting = commands.add_parser(
        "export",
        help="write a model as one safetensors file",
        description="Writes a model's tensors, with the names in its state_dict, to one safetensors file, which "
        "safetensors.torch and transformers can read.",
    )
    exporting.add_argument("path", metavar="PATH", help=_CHECKPOINT_PATH_HELP)
    exporting.add_argument("output", metavar="FILE", help="such as model.safetensors")
    exporting.add_argument(
        "--only", metavar="NAME", default="model", help="the entry of the state to export (default: model); '' for all"
    )


def _run_checkpoint_command(options: argparse.Namespace) -> int:
    from paceline.cli.checkpoints import diff, export_model, inspect, verify

    actions = {"inspect": inspect, "verify": verify, "diff": diff, "export": export_model}
    try:
        return actions[options.action](options)
    except RecursionError:
        raise PacelineError("the values of the checkpoint are nested too deeply") from None


def _add_launch_script_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind", choices=("slurm", "k8s", "jobset", "kubeflow", "ray"), help="the scheduler that the script is for"
    )
    parser.add_argument("--nodes", type=int, default=2, help="machines (default: 2)")
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", default="gpu", help="workers per machine (default: gpu)"
    )
    parser.add_argument("--gpus", type=int, default=8, help="GPUs per machine, 0 for none (default: 8)")
    parser.add_argument("--cpus", type=int, default=8, help="cores per machine (default: 8)")
    parser.add_argument("--memory", default="32Gi", help="memory of each pod (default: 32Gi)")
    parser.add_argument("--name", help="the job's name (default: the script's)")
    parser.add_argument("--image", default="REGISTRY/IMAGE:TAG", help="the pods' image")
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=3,
        help="the maximum number of restarts of failed workers and, in Kubernetes, of pods (default: 3)",
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...")


def _print_launch_script(options: argparse.Namespace) -> int:
    from paceline.operate.launch.launch_script import KINDS, LaunchScriptOptions

    name = options.name or Path(options.script).stem.lower().replace("_", "-")
    workers = "cpu" if options.nproc_per_node == "gpu" and not options.gpus else options.nproc_per_node
    request = LaunchScriptOptions(
        (options.script, *options.args),
        nodes=options.nodes,
        workers=workers,
        gpus=options.gpus,
        cpus=options.cpus,
        memory=options.memory,
        name=name,
        image=options.image,
        max_restarts=options.max_restarts,
    )
    print(KINDS[options.kind](request), end="")
    return 0


def _add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file or folder of the program")
    parser.add_argument("--write", action="store_true", help="change the files instead of printing the changes")
    parser.add_argument(
        "--way",
        choices=("auto", "import", "plugin"),
        default="auto",
        help="import: `import paceline as dist`; plugin: torch.distributed with the backend paceline; auto: the latter "
        "if the program uses features built on torch's groups (default: auto)",
    )


def _migrate(options: argparse.Namespace) -> int:
    """Prints a diff or changes the files, and prints a report to stderr."""
    from paceline.interop.migrate.names import MigrationMode
    from paceline.interop.migrate.project import MissingLibCST, migrate

    try:
        program = migrate(options.paths, None if options.way == "auto" else MigrationMode(options.way))
        written = program.write() if options.write else 0
    except (MissingLibCST, OSError) as error:
        raise PacelineError(str(error)) from error
    if not options.write:
        for file in program.files:
            sys.stdout.writelines(_file_diff(file))
    for line in _migration_report(program):
        print(line, file=sys.stderr)
    if options.write:
        print(f"{written} file{'s' * (written != 1)} changed.", file=sys.stderr)
    elif any(file.changes for file in program.files):
        print("Nothing has been changed; --write changes the files.", file=sys.stderr)
    return 0


def _file_diff(file: ProgramFile) -> Iterator[str]:
    from difflib import unified_diff  # slow to import; this module is imported by every command
    from io import StringIO

    before, after = (list(StringIO(text, newline="\n")) for text in (file.before, file.after.text))
    for line in unified_diff(before, after, str(file.path), str(file.path)):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _migration_report(program: MigratedProgram) -> Iterator[str]:
    from paceline.interop.migrate.names import score

    for path, why in program.unread:
        yield f"{path}: left unchanged because it is not valid Python: {why}"
    for file in program.files:
        migrated, total = score(file.after.places)
        yield f"{file.path}: {migrated} of {total}"
        for place in file.after.places:
            if place.reason is not None:
                yield f"  line {place.line}, {place.what}: to do: {place.reason}"
            elif place.note is not None:
                yield f"  line {place.line}, {place.what}: {place.note}"
    migrated, total = score(program.places())
    if not total:
        yield "There is nothing to migrate: no torch.distributed, Horovod or launch command was found."
        return
    reason = program.choice.reason
    way = f', with torch.distributed and its backend "paceline": {reason}' if reason else ""
    yield f"{migrated} of {total} locations were migrated{way}."


def _add_top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="the job's directory, its name in `paceline runs`, or its page's address (default: the latest running)",
    )
    parser.add_argument("--once", action="store_true", help="print the view once and exit")
    parser.add_argument("--plain", action="store_true", help="plain text, even if Textual is installed")
    parser.add_argument(
        "--every", type=_refresh_interval, default=1.0, metavar="SECONDS", help="refresh interval (default: 1)"
    )


def _show_top(options: argparse.Namespace) -> int:
    """Displays a job until it ends or the user quits."""
    from importlib.util import find_spec

    from paceline.cli.top.client import find, poller_of
    from paceline.cli.top.text_view import lines_of, show

    look = poller_of(find(options.job))
    look()  # raises an error for an invalid address before switching screens
    is_plain = options.plain or options.once or not sys.stdout.isatty() or not sys.stdin.isatty()
    if not is_plain and find_spec("textual") is not None:
        from paceline.cli.top.app import Top

        Top(look, options.every).run()
    else:
        show(lambda *size: lines_of(look(), *size), options.every, options.once)
    return 0


def _add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell, one of %(choices)s", metavar="SHELL")


def _print_completion(environment: Mapping[str, str], options: argparse.Namespace) -> int:
    print(completion_script(options.shell, parser(environment)))
    return 0


def _refresh_interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


class VersionAction(argparse.Action):
    """An argparse action that prints version information and exits. The text is computed only when it is printed."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Prints the version information and exits with code 0."""
        print("\n".join(version_lines()))
        parser.exit()


def version_lines() -> list[str]:
    """Returns the output of `paceline --version` (versions, engine, kernels) without importing torch."""
    from paceline import _core

    levels = _core.wire_levels()
    machine = platform.machine()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return [
        f"paceline {__version__}",
        f"engine: paceline, with its native core for {machine} ({python})",
        f"CPU kernels: {kernels(levels, machine)}",
        f"torch: {_version_of('torch')}",
    ]


def kernels(levels: Sequence[str], machine: str) -> str:
    """Describes the SIMD levels for which this machine has kernels, with the level in use first.

    >>> kernels(["baseline", "avx2"], "x86_64"), kernels(["baseline"], "aarch64")
    ('AVX2 (also SSE2)', 'NEON')
    """
    names = _ON_X86 if machine == "x86_64" else _ON_ARM if machine == "aarch64" else {}
    fastest, *others = [names.get(level, level) for level in reversed(levels)]
    return f"{fastest} (also {', '.join(others)})" if others else fastest


def _version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@dataclass(frozen=True)
class _Subcommand:
    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _from(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: object) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    return call


def _subcommands(environment: Mapping[str, str] = os.environ) -> tuple[_Subcommand, ...]:
    """Returns the subcommands. Those that start workers read defaults from the PET_* variables in `environment`."""
    return (
        _Subcommand(
            "run",
            "run a script in several processes on one or more machines",
            "Runs a script in several processes on one or more machines, as torchrun does. Each worker finds RANK, "
            "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment; init_process_group() needs "
            "nothing else.",
            partial(add_run_arguments, environment=environment),
            run,
        ),
        _Subcommand(
            "join",
            "join a job that another machine started",
            "Joins the job whose launcher printed TOKEN, with workers on this machine. Only the command given here "
            "is run; the script must be the same on all machines.",
            partial(_add_join_arguments, environment=environment),
            run,
        ),
        _Subcommand(
            "launch-script",
            "print a batch script or manifest for Slurm, Kubernetes or Ray",
            "Prints a file with which the scheduler starts SCRIPT on several machines, ready to submit. Kubernetes "
            "manifests contain a new secret, so keep them confidential.",
            _add_launch_script_arguments,
            _print_launch_script,
        ),
        _Subcommand(
            "doctor",
            "check this machine, the network to another one, or a script",
            "Checks this machine; with --listen here and --peer there, the network between two machines; with SCRIPT, "
            "a script for known mistakes, each reported with its line, reason and fix.",
            _from("paceline.cli.doctor.command", "add_arguments"),
            _from("paceline.cli.doctor.command", "run"),
        ),
        _Subcommand(
            "plan",
            "measure a script, and predict how fast it would train on other machines",
            "With --measure, runs SCRIPT for some steps on this machine and writes a calibration. With a calibration, "
            "predicts the step time, rate, memory and cost for other numbers of machines, and suggests changes.",
            _from("paceline.cli.plan", "add_arguments"),
            _from("paceline.cli.plan", "run"),
        ),
        _Subcommand(
            "analyze",
            "find out from a job's files what went wrong, and which ranks the others waited for",
            "Reads the recordings that a job left in RUN_DIR, and reports which rank failed, was absent or was usually "
            "late, and why. Some of the files may be missing.",
            _from("paceline.cli.recordings", "add_analyze_arguments"),
            _from("paceline.cli.recordings", "analyze"),
        ),
        _Subcommand(
            "runs",
            "list the latest jobs of this user on this machine",
            "Lists the jobs that have a directory of recordings, the latest first, each with its start, its outcome "
            "and its command.",
            _from("paceline.cli.recordings", "add_runs_arguments"),
            _from("paceline.cli.recordings", "show_runs"),
        ),
        _Subcommand(
            "trace",
            "write a job's recordings as a trace for ui.perfetto.dev",
            "Writes the calls, steps and spans of all ranks of a job on one time axis, with arrows from sends to "
            "receives, as a trace that ui.perfetto.dev and chrome://tracing show.",
            _from("paceline.cli.recordings", "add_trace_arguments"),
            _from("paceline.cli.recordings", "write_trace"),
        ),
        _Subcommand(
            "report",
            "write a job's recordings as one HTML file, to view or to attach to an issue",
            "Reads the recordings and logs that a job left in RUN_DIR, and writes one self-contained HTML page. The "
            "page contains the job's output and the names of its hosts.",
            _from("paceline.cli.recordings", "add_report_arguments"),
            _from("paceline.cli.recordings", "write_report"),
        ),
        _Subcommand(
            "top",
            "show a running job in the terminal",
            "Shows a job that was started with `paceline run --dash`, by default this user's latest job on this "
            "machine. With paceline[top], its table can be scrolled and sorted.",
            _add_top_arguments,
            _show_top,
        ),
        _Subcommand(
            "checkpoint",
            "show, verify, compare and export checkpoints",
            "Shows, verifies, compares and exports the checkpoints that paceline.save and CheckpointManager wrote.",
            _add_checkpoint_arguments,
            _run_checkpoint_command,
        ),
        _Subcommand(
            "migrate",
            "rewrite a program that uses torch.distributed or Horovod, and the files that start it",
            "Rewrites Python files, shell scripts, batch files, YAML and Dockerfiles so that they use Paceline. Prints "
            "the changes as a diff, or makes them with --write; remaining work becomes a comment with the reason. "
            "Needs paceline[migrate].",
            _add_migrate_arguments,
            _migrate,
        ),
        _Subcommand(
            "completion",
            "print a script for Tab completion in bash, zsh, fish or tcsh",
            "Prints a script with which SHELL completes the commands, flags, choices and file names of this command "
            'line. In bash: eval "$(paceline completion bash)".',
            _add_completion_arguments,
            partial(_print_completion, environment),
        ),
    )


COMMANDS = tuple(command.name for command in _subcommands())


def parser(environment: Mapping[str, str] = os.environ, used: str | None = None) -> argparse.ArgumentParser:
    """Returns the complete parser. If `used` is given, only that subcommand's arguments are added."""
    whole = Parser(prog="paceline", description="Distributed data-parallel training for PyTorch.")
    whole.add_argument("--version", action=VersionAction, help="print the installed versions and the kernels in use")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _subcommands(environment):
        added = commands.add_parser(command.name, help=command.help, description=command.description)
        added.whole = partial(parser, environment)
        if used in (None, command.name):
            command.add_arguments(added)
    return whole


def _mistaken_command(words: Sequence[str]) -> str | None:
    """Returns an error message with a suggestion if the first word is not a known command, otherwise None."""
    import shlex
    from difflib import get_close_matches

    if not words:
        return f"a command is missing: {', '.join(COMMANDS)}"
    first = words[0]
    if first in (*COMMANDS, "-h", "--help", "--version"):
        return None
    if first.startswith("-") and (first == "-" or not is_flag(first)):
        meant = get_close_matches(first, ("--version", "--help"), n=1)
        return f"{first} is not a flag" + (f"; did you mean `paceline {meant[0]}`?" if meant else "")
    near = get_close_matches(first, COMMANDS, n=1)
    if near and not os.path.exists(first):
        return f"{first} is not a command; did you mean `paceline {near[0]}`?"
    whole = shlex.join(["paceline", "run", *words])
    return f"{first} is not a command; did you mean `{whole}`?"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand; returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if mistake := _mistaken_command(words):
        print(f"paceline: {mistake}\nSee `paceline --help` for all commands.", file=sys.stderr)
        return 2
    options = parser(used=words[0]).parse_args(words)
    if options.command == "run":
        options.words = words[1:]  # the command line to run on each machine in --hosts
    [command] = [command for command in _subcommands() if command.name == options.command]
    return run(options) if command.run is run else _run_printing(command.run, options)


def _run_printing(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs a command that prints; returns its exit code.

    The code is 2 after an error, which is printed without a traceback; 128 + SIGPIPE if the output was closed
    (`... | head`); and 128 + SIGINT after Ctrl-C.
    """
    name = " ".join(("paceline", options.command, *([options.action] if "action" in options else [])))
    for stream in (sys.stdout, sys.stderr):  # with LANG=C, names in other alphabets are escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with interrupts_raised():
            code = command(options)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _is_without_reader(sys.stdout.fileno()):
            raise
        _discard_output()
        return 128 + signal.SIGPIPE
    except PacelineError as error:
        print(printable(f"{name}: {error}"), file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is not None:
            print(printable(f"{name}: {error.filename}: {error.strerror}"), file=sys.stderr)
            return 2
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"paceline {options.command}: the output cannot be written: {error.strerror}", file=sys.stderr)
        _discard_output()
        return 1
    return code


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit


def _is_without_reader(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
