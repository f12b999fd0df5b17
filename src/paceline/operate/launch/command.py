"""Implements `paceline run`, `paceline join` and `python -m paceline.launch`, given the parsed options.

`cli/main.py` and `paceline/launch.py` parse the command lines. Most imports are inside functions, so that help texts
and usage errors are printed quickly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from paceline.operate.launch.flags import add_flags

if TYPE_CHECKING:
    from paceline.comm.security.authenticated_listener import ListeningEndpoint
    from paceline.operate.launch.job import Job


def add_run_arguments(parser: argparse.ArgumentParser, environment: Mapping[str, str] = os.environ) -> None:
    """Adds the launcher's flags, the script and the script's arguments to a parser."""
    add_flags(parser, environment)
    parser.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(options: argparse.Namespace) -> int:
    """Runs the job described by the flags, or prints it with --dry-run. Reports each error on one line.

    Returns the exit code: 2 for invalid flags, 1 for other errors, and 130 if Ctrl-C raised KeyboardInterrupt before
    the launcher installed its signal handlers.
    """
    return run_command(options, _join if getattr(options, "token", None) else _run)


def run_command(options: argparse.Namespace, action: Callable[[argparse.Namespace], int]) -> int:
    """Calls `action`, and handles errors and exit codes as `run` does."""
    from paceline.errors import PacelineError
    from paceline.operate.launch.workers.output import open_standard_streams

    open_standard_streams()
    try:
        return action(options)
    except (PacelineError, ValueError, OSError) as error:
        print(f"paceline {getattr(options, 'command', 'run')}: {explain_os_error(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:  # raised under `interrupts_raised`, which is used before any worker runs
        return 130


def explain_os_error(error: Exception) -> Exception:
    """Converts a bare `OSError` into an error that names the missing resource and suggests a remedy."""
    from paceline.errors import PacelineError
    from paceline.linux import is_out_of_descriptors, out_of_descriptors_error

    if not isinstance(error, OSError) or isinstance(error, PacelineError):
        return error
    if is_out_of_descriptors(error):
        return out_of_descriptors_error(f"the launcher (pid {os.getpid()})", "its workers, about 8 for each")
    if not os.path.exists("/proc/self/stat"):
        return PacelineError(
            f"/proc is not mounted, or belongs to another system ({error}); the launcher needs it to watch its "
            "workers. Mount it (mount -t proc proc /proc), or start the container with it"
        )
    return error


def _run(options: argparse.Namespace) -> int:
    from paceline.operate.launch.job import job_of
    from paceline.operate.launch.option_types import OptionError

    if options.hosts:
        from paceline.operate.launch.ssh.ssh_launcher import run_on_hosts

        return run_on_hosts(options)
    choose_security(options)
    if options.print_token and options.nnodes[1] == 1:
        raise OptionError(
            "--print-token needs --nnodes N or MIN:MAX: the number of machines that will join, including this one"
        )
    job = job_of(options)
    _check_settings(options, job)
    if options.dry_run:
        from paceline.operate.launch.workers.start_workers import MachineResources, describe_plan

        print(describe_plan(job, MachineResources.mine(job)))
        return 0
    from paceline.operate.launch.worker_group_launcher import run as run_job

    job = _with_text(job)
    if not options.print_token:
        return run_job(job)
    job, listener, secret, token = _token(job)
    # The token is on a separate line, because it contains the secret, and any user on a machine can read command lines.
    print(f"paceline join - {' '.join(_words(options))}\n{token}", flush=True)
    return run_job(job, listener, secret)


def choose_security(options: argparse.Namespace) -> None:
    """Exports the security options to the environment, and checks that this machine supports the security level."""
    from paceline.comm.security.encryption import identity_of
    from paceline.comm.security.secret import INSECURE_VARIABLE, LEVEL_VARIABLE, chosen_level

    if options.security is not None:
        os.environ[LEVEL_VARIABLE] = options.security
    if options.insecure:
        os.environ[INSECURE_VARIABLE] = "1"
    level = chosen_level()
    if level == "none" and (getattr(options, "token", None) or options.print_token):
        raise ValueError("a join token contains a secret, which --security none does not use; leave one of them out")
    if level == "encrypt":
        identity_of(b"")


def _token(job: Job) -> tuple[Job, ListeningEndpoint | None, bytes, str]:
    """Returns the job, its rendezvous listener, its secret, and the token that other machines need to join.

    The listener is None in a job with a single port, because the launcher opens that port itself.
    """
    import secrets
    from dataclasses import replace

    from paceline.comm.security.secret import job_secret
    from paceline.comm.store.tcp_store import listen
    from paceline.operate.launch.multinode.node_connection import own_address
    from paceline.operate.launch.shared_secret import JoinToken

    host, port = job.rendezvous.address or ("", 0)
    host = host or own_address()
    secret = job_secret() or secrets.token_bytes(32)
    if job.one_port is not None:
        job = replace(job, rendezvous=replace(job.rendezvous, address=(host, port)))
        return job, None, secret, JoinToken(host, port, secret).encode()
    listener = listen(host, port, secret)
    return job, listener, secret, JoinToken(host, listener.getsockname()[1], secret).encode()


def _words(options: argparse.Namespace) -> list[str]:
    import shlex

    switches = (("--elastic", options.elastic), ("-m", options.module), ("--no-python", options.no_python))
    flags = [name for name, is_on in switches if is_on]
    if options.compat:
        flags += ["--compat", ",".join(options.compat)]
    if options.security is not None:
        flags += ["--security", options.security, *(["--insecure"] if options.insecure else [])]
    if options.port is not None:
        flags += ["--port", str(options.port)]
    return [*flags, *map(shlex.quote, [options.script, *options.args])]


def _join(options: argparse.Namespace) -> int:
    from paceline.operate.launch.job import CommandKind, job_of
    from paceline.operate.launch.option_types import OptionError
    from paceline.operate.launch.shared_secret import JoinToken, read_token
    from paceline.operate.launch.worker_group_launcher import run as run_job

    if options.hosts:
        raise OptionError(
            "--hosts starts a job on other machines, and `paceline join` joins an existing job: leave --hosts out"
        )
    choose_security(options)
    if options.token == "-":
        token = JoinToken.decode(read_token()).require_printed()
    else:
        token = JoinToken.decode(options.token).require_printed()
        print(
            "paceline join: other users of this machine can read the token in its list of processes, and join the job "
            "with it; `paceline join -` prompts for it",
            file=sys.stderr,
        )
    host = f"[{token.host}]" if ":" in token.host else token.host
    options.rdzv_endpoint, options.rdzv_backend = f"{host}:{token.port}", "c10d"
    options.rdzv_conf = {**options.rdzv_conf, "is_host": "0"}
    options.nnodes = (2, 2)  # any number above 1; the machine that hosts the rendezvous determines the actual number
    job = job_of(options)
    if options.token == "-" and job.command.kind is CommandKind.STDIN:
        raise OptionError(f"the token is read from stdin, so the script {options.script} cannot be; pass a file")
    _check_settings(options, job)
    return run_job(_with_text(job), secret=token.secret)


def _with_text(job: Job) -> Job:
    """Reads the script from stdin if the job's script is `-`, because only one worker could read it."""
    from dataclasses import replace

    from paceline.linux import memfd_create
    from paceline.operate.launch.job import CommandKind
    from paceline.operate.launch.option_types import OptionError

    if job.command.kind is not CommandKind.STDIN:
        return job
    name = job.command.argv[0]
    if sys.stdin is None or sys.stdin.isatty():
        raise OptionError(f"{name} is stdin, from which no script can be read here; pass a file: {name} < SCRIPT")
    file = memfd_create("paceline-script")  # open until the launcher exits; workers that restart read it again
    with open(file, "wb", closefd=False) as copy:
        copy.write(sys.stdin.buffer.read())
    return replace(job, command=replace(job.command, text_file=f"/proc/{os.getpid()}/fd/{file}"))


def _check_settings(options: argparse.Namespace, job: Job) -> None:
    from paceline.operate.launch.flags import flags_after_script
    from paceline.operate.launch.workers.environment import check_variables, misspelled

    check_variables(job.rendezvous.address is not None)
    for sentence in (*misspelled(), *flags_after_script(options.script, options.args)):
        print(f"paceline: {sentence}", file=sys.stderr)
