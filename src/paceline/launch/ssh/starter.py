"""Runs `paceline run --hosts` on the machine where it was typed: it starts the launchers and shows what they print."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import selectors
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from paceline import __version__
from paceline.launch.job import shutdown_timeout_s
from paceline.launch.output import Console, prefix, wants_colours
from paceline.launch.signals import Signals
from paceline.launch.ssh.calling import Call, command_for, is_here
from paceline.launch.ssh.conduct import Conduct, Cut, Give, Limits, PassOn, Say
from paceline.launch.ssh.hosts import Host, hosts_of
from paceline.launch.ssh.messages import Part, Signal
from paceline.launch.ssh.refusals import Attempt
from paceline.launch.values import OptionError
from paceline.security.levels import chosen_level
from paceline.security.secret import job_secret

START_S = 120.0
_LOOK_S = 1.0  # processes are looked at this often, should the news of an end get lost
_TAKEN_ALONG = ("OMP_NUM_THREADS", "PYTHONPATH", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
_OURS_TAKEN_ALONG = (
    "SECURITY",
    "INSECURE",
    "IFACE",
    "ALGORITHM",
    "COSTS",
    "CONGESTION",
    "CHECKS",
    "RECORD",
    "STREAMS",
    "PORT",
)


def run_on_hosts(options: argparse.Namespace) -> int:
    """Runs the job on the machines of `--hosts`; returns the exit code.

    Raises:
        OptionError: flags contradict each other, or a machine cannot be read.
    """
    hosts = hosts_of(options.hosts)
    _refuse_others(options)
    attempts = [_attempt(host, options.remote_python) for host in hosts]
    commands = [command_for(each, shlex.split(options.ssh)) for each in attempts]
    if options.dry_run:
        for attempt, command in zip(attempts, commands, strict=True):
            print(f"{attempt.destination}: {shlex.join(command)}")
        return 0
    shutdown_s = shutdown_timeout_s(options, os.environ)
    parts = parts_of(hosts, options, os.environ, shutdown_s)
    conduct = Conduct(parts, attempts, Limits(START_S, shutdown_s), time.monotonic(), options.elastic)
    with Starter(conduct, commands, [host.name for host in hosts], options.signals_to_handle) as starter:
        return starter.run()


def _attempt(host: Host, remote_python: str | None) -> Attempt:
    local = is_here(host)
    python = sys.executable if local or remote_python is None else remote_python
    return Attempt(host.destination, python, __version__, local)


def _refuse_others(options: argparse.Namespace) -> None:
    others = {
        "--nnodes": options.nnodes != (1, 1),
        "--node-rank": options.node_rank is not None,
        "--rdzv-endpoint": bool(options.rdzv_endpoint),
        "--standalone": options.standalone,
        "--print-token": options.print_token,
    }
    if given := [name for name, is_given in others.items() if is_given]:
        raise OptionError(
            f"{' and '.join(given)}: with --hosts the machines and their numbers are known; leave {given[0]} out"
        )


def parts_of(
    hosts: Sequence[Host], options: argparse.Namespace, environment: Mapping[str, str], shutdown_s: float
) -> list[Part]:
    """Returns what each machine is to run."""
    secret = None
    if (options.security or chosen_level()) != "none":
        secret = (job_secret() or secrets.token_bytes(32)).hex()
    run_id = options.rdzv_id if options.rdzv_id not in ("", "none") else secrets.token_hex(4)
    return [
        Part(
            words=list(options.words),
            directory=options.remote_dir or _directory(environment),
            environment=taken_along(environment, options.export),
            secret=secret,
            node_rank=number,
            nodes=len(hosts),
            workers=host.slots,
            run_id=run_id,
            shutdown_s=shutdown_s,
            towards=next((other.name for other in hosts if other != host), ""),
            passes_local_rank=getattr(options, "passes_local_rank", False),
        )
        for number, host in enumerate(hosts)
    ]


def _directory(environment: Mapping[str, str]) -> str:
    """Returns the current directory by the name that the user knows, which may lead through links."""
    named = environment.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.samefile(named, "."):
            return named
    return os.getcwd()


def taken_along(environment: Mapping[str, str], exported: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the variables that go to the other machines: flags, Paceline's settings, and those of `--export`.

    Raises:
        OptionError: a variable of `--export` is not set.
    """
    names = {*_TAKEN_ALONG, *(f"PACELINE_{name}" for name in _OURS_TAKEN_ALONG)}
    taken = {name: value for name, value in environment.items() if name in names or name.startswith("PET_")}
    for name, value in exported.items():
        if value is None and name not in environment:
            raise OptionError(f"--export {name}: there is no such variable here; set it, or write {name}=VALUE")
        taken[name] = environment[name] if value is None else value
    return taken


class Starter:
    """The launchers of a job as processes of this one; `with` ends those that still run."""

    def __init__(
        self,
        conduct: Conduct,
        commands: Sequence[Sequence[str]],
        names: Sequence[str],
        signals: Sequence[signal.Signals],
    ) -> None:
        self._conduct = conduct
        self._commands = commands
        self._names = names
        self._signals = Signals(signals)
        self._console = Console(lambda: self._signals.has_come)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals.fileno(), selectors.EVENT_READ)
        self._calls: dict[int, Call] = {}

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._calls.values():
            call.close()
        self._selector.close()
        self._signals.close()

    def run(self) -> int:
        """Starts all launchers, and returns the job's exit code when they have ended."""
        for machine in range(len(self._commands)):
            self._start(machine)
        while not self._conduct.is_over:
            self._act()
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is None:
                    self._on_signals()
                elif key.data[0] in self._calls:
                    self._on_output(*key.data)
            self._look_for_ends()
            self._conduct.tick(time.monotonic())
        self._act()
        return self._conduct.exit_code

    def _start(self, machine: int) -> None:
        name = self._names[machine]
        prefixes = (prefix(name, machine, wants_colours(1)), prefix(name, machine, wants_colours(2)))
        try:
            call = Call(self._commands[machine], prefixes, (self._console.writer(1), self._console.writer(2)))
        except FileNotFoundError as error:
            program = self._commands[machine][0]
            raise OptionError(
                f"there is no {program} on this machine, which is needed to reach {name}; install "
                "OpenSSH's client (package openssh-client), or name it with --ssh"
            ) from error
        self._calls[machine] = call
        for stream, descriptor in enumerate(call.descriptors):
            self._selector.register(descriptor, selectors.EVENT_READ, (machine, stream))

    def _wait_s(self) -> float:
        deadline_s = self._conduct.deadline_s
        return _LOOK_S if deadline_s is None else min(_LOOK_S, max(0.0, deadline_s - time.monotonic()))

    def _on_output(self, machine: int, stream: int) -> None:
        call = self._calls[machine]
        said, is_all = call.read(stream)
        for message in said:
            self._conduct.said(machine, message, time.monotonic())
        if is_all:
            self._selector.unregister(call.descriptors[stream])

    def _on_signals(self) -> None:
        numbers, _ = self._signals.read()
        for number in numbers:
            self._conduct.signalled(number.name, time.monotonic())

    def _look_for_ends(self) -> None:
        for machine, call in list(self._calls.items()):
            code = call.exit_code()
            if code is None:
                continue
            for descriptor in call.descriptors:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(descriptor)
            for message in call.rest():
                self._conduct.said(machine, message, time.monotonic())
            self._conduct.ended(machine, code, call.errors, time.monotonic())
            del self._calls[machine]
            call.close()

    def _act(self) -> None:
        for action in self._conduct.take_actions():
            match action:
                case Say(text):
                    self._console.say(text)
                case Give(machine, part) if machine in self._calls:
                    self._calls[machine].tell(part)
                case PassOn(machine, name) if machine in self._calls:
                    self._calls[machine].tell(Signal(name))
                case Cut(machine) if machine in self._calls:
                    self._calls[machine].cut()
