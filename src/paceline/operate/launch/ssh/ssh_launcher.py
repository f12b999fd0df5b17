"""Starts the launchers for `paceline run --hosts`: parses host lists, runs launcher processes, and shows their output.

A launcher is started by ssh, or directly if it runs on this machine. Machines are listed as `a:4,anna@b`, or in a host
file in the format of Open MPI, MPICH, Horovod or DeepSpeed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import __version__
from paceline.comm.security.secret import chosen_level, job_secret
from paceline.durations import whole_number
from paceline.operate.launch.job import STDIN, shutdown_timeout_s
from paceline.operate.launch.option_types import OptionError
from paceline.operate.launch.ssh.protocol import (
    FromLauncher,
    MessageSplitter,
    NodeAssignment,
    ToLauncher,
    encode_to_launcher,
)
from paceline.operate.launch.ssh.remote_launch import (
    Disconnect,
    LaunchAttempt,
    RemoteLaunch,
    SendMessage,
    ShowText,
)
from paceline.operate.launch.workers.job_control import Signals
from paceline.operate.launch.workers.output import Console, LinePrefixer, in_color, wants_colors

_NAME = re.compile(
    r"(?:(?P<user>[\w.+-]+)@)?(?P<host>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\])(?::(?P<slots>[0-9]+))?"
)
_COUNTS = ("slots", "cpu", "count")
_USERS = ("user", "username")
_IGNORED = ("max_slots", "max-slots", "ifname", "binding")  # limits and placement hints for other launchers
# Removes the current directory from the path, because modules in ssh's initial directory may shadow installed modules.
FAR_END = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from paceline.operate.launch.ssh.remote_launcher import main; sys.exit(main())"
)
# Options for ssh: no prompts, because several machines would prompt at once; a separate connection, which ends with the
# launcher; and a timeout after 15 s without a response from the network.
SSH_OPTIONS = (
    *("-T", "-a", "-x", "-S", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_TAIL_BYTES = 1 << 13
START_S = 120.0
_POLL_S = 1.0  # interval between checks for exited processes whose pipes are still open
_FORWARDED = {
    *("OMP_NUM_THREADS", "PYTHONPATH", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    *("PACELINE_SECURITY", "PACELINE_INSECURE", "PACELINE_PORT", "PACELINE_IFACE", "PACELINE_CONGESTION"),
    *("PACELINE_ALGORITHM", "PACELINE_COSTS", "PACELINE_STREAMS", "PACELINE_CHECKS", "PACELINE_RECORD"),
}


@dataclass(frozen=True)
class Host:
    """A machine in the list of hosts."""

    name: str
    user: str | None = None  # login name
    slots: int | None = None  # number of workers

    @property
    def destination(self) -> str:
        """The destination argument for ssh."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def run_on_hosts(options: argparse.Namespace) -> int:
    """Runs the job on the machines listed in `--hosts`; returns the exit code."""
    hosts = hosts_of(options.hosts)
    _reject_contradictions(options)
    attempts = [_attempt(host, options.remote_python) for host in hosts]
    commands = [command_for(attempt, shlex.split(options.ssh)) for attempt in attempts]
    if options.dry_run:
        for attempt, command in zip(attempts, commands, strict=True):
            print(f"{attempt.destination}: {shlex.join(command)}")
        return 0
    shutdown_s = shutdown_timeout_s(options, os.environ)
    parts = parts_of(hosts, options, os.environ, shutdown_s)
    launch = RemoteLaunch(parts, attempts, START_S, shutdown_s, time.monotonic(), options.elastic)
    with SshLauncher(launch, commands, [host.name for host in hosts], options.signals_to_handle) as launcher:
        return launcher.run()


def _attempt(host: Host, remote_python: str | None) -> LaunchAttempt:
    local = is_here(host)
    python = sys.executable if local or remote_python is None else remote_python
    return LaunchAttempt(host.destination, python, __version__, local)


def _reject_contradictions(options: argparse.Namespace) -> None:
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
    if options.script in STDIN and not (options.module or options.no_python or options.run_path):
        raise OptionError(
            f"{options.script} is stdin, from which the other machines cannot read the script; write the script to a "
            "file that all machines have"
        )


def parts_of(
    hosts: Sequence[Host], options: argparse.Namespace, environment: Mapping[str, str], shutdown_s: float
) -> list[NodeAssignment]:
    """Returns the assignment for each machine."""
    secret = None
    if (options.security or chosen_level()) != "none":
        secret = (job_secret() or secrets.token_bytes(32)).hex()
    run_id = options.rdzv_id if options.rdzv_id not in ("", "none") else secrets.token_hex(4)
    return [
        NodeAssignment(
            words=list(options.words),
            directory=options.remote_dir or _directory(environment),
            environment=forwarded_variables(environment, options.export),
            secret=secret,
            node_rank=number,
            nodes=len(hosts),
            workers=host.slots,
            run_id=run_id,
            shutdown_s=shutdown_s,
            toward=next((other.name for other in hosts if other != host), ""),
            passes_local_rank=getattr(options, "passes_local_rank", False),
        )
        for number, host in enumerate(hosts)
    ]


def _directory(environment: Mapping[str, str]) -> str:
    """Returns the current directory as the user entered it, without resolving symbolic links."""
    named = environment.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.samefile(named, "."):
            return named
    return os.getcwd()


def forwarded_variables(environment: Mapping[str, str], exported: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the variables to set on other machines: flags, Paceline's settings, and those listed in `--export`."""
    found = {name: value for name, value in environment.items() if name in _FORWARDED or name.startswith("PET_")}
    for name, value in exported.items():
        if value is None and name not in environment:
            raise OptionError(f"--export {name}: this variable is not set here; set it, or write {name}=VALUE")
        found[name] = environment[name] if value is None else value
    return found


class SshLauncher:
    """Runs a job's launchers as child processes, and stops them when the `with` block exits."""

    def __init__(
        self,
        launch: RemoteLaunch,
        commands: Sequence[Sequence[str]],
        names: Sequence[str],
        signals: Sequence[signal.Signals],
    ) -> None:
        self._launch = launch
        self._commands = commands
        self._names = names
        self._signals = Signals(signals)
        self._console = Console(lambda: self._signals.has_arrived)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals.fileno(), selectors.EVENT_READ)
        self._launchers: dict[int, LauncherProcess] = {}

    def __enter__(self) -> SshLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self._launchers.values():
            launcher.close()
        self._selector.close()
        self._signals.close()

    def run(self) -> int:
        """Starts all launchers and waits for them to exit; returns the job's exit code."""
        for machine in range(len(self._commands)):
            self._start(machine)
        while not self._launch.is_over:
            self._act()
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is None:
                    for number in self._signals.read()[0]:
                        self._launch.signaled(number.name, time.monotonic())
                elif key.data[0] in self._launchers:
                    self._on_output(*key.data)
            self._collect_ended()
            self._launch.tick(time.monotonic())
        self._act()
        return self._launch.exit_code

    def _start(self, machine: int) -> None:
        name = self._names[machine]
        lines = [
            LinePrefixer(in_color(f"[{name}] ", machine, wants_colors(fd)), self._console.writer(fd)) for fd in (1, 2)
        ]
        try:
            launcher = LauncherProcess(self._commands[machine], lines)
        except FileNotFoundError as error:
            program = self._commands[machine][0]
            raise OptionError(
                f"{program}, which is needed to reach {name}, was not found on this machine; install OpenSSH's client "
                "(package openssh-client), or specify it with --ssh"
            ) from error
        self._launchers[machine] = launcher
        for stream, descriptor in enumerate(launcher.descriptors):
            self._selector.register(descriptor, selectors.EVENT_READ, (machine, stream))

    def _wait_s(self) -> float:
        deadline_s = self._launch.deadline_s
        return _POLL_S if deadline_s is None else min(_POLL_S, max(0.0, deadline_s - time.monotonic()))

    def _on_output(self, machine: int, stream: int) -> None:
        launcher = self._launchers[machine]
        messages, has_ended = launcher.read(stream)
        for message in messages:
            self._launch.receive(machine, message, time.monotonic())
        if has_ended:
            self._selector.unregister(launcher.descriptors[stream])

    def _collect_ended(self) -> None:
        for machine, launcher in list(self._launchers.items()):
            code = launcher.exit_code()
            if code is None:
                continue
            for descriptor in launcher.descriptors:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(descriptor)
            for message in launcher.drain():
                self._launch.receive(machine, message, time.monotonic())
            self._launch.ended(machine, code, launcher.errors, time.monotonic())
            del self._launchers[machine]
            launcher.close()

    def _act(self) -> None:
        for action in self._launch.take_actions():
            match action:
                case ShowText(text):
                    self._console.print_line(text)
                case SendMessage(machine, message) if machine in self._launchers:
                    self._launchers[machine].send(message)
                case Disconnect(machine) if machine in self._launchers:
                    self._launchers[machine].disconnect()


class LauncherProcess:
    """A launcher's local process: ssh, or the launcher itself. `lines` receive its stdout and its stderr."""

    def __init__(self, command: Sequence[str], lines: Sequence[LinePrefixer]) -> None:
        # Each launcher gets its own session, because the launching process forwards Ctrl-C from the terminal.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._splitter = MessageSplitter()
        self._lines = lines
        assert self._process.stdin is not None and self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self._pipes = [self._process.stdout, self._process.stderr]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._errors = b""

    @property
    def errors(self) -> str:
        """The last part of the output on stderr."""
        return self._errors.decode(errors="replace")

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of stdout and stderr."""
        return [pipe.fileno() for pipe in self._pipes]

    def read(self, stream: int) -> tuple[list[FromLauncher], bool]:
        """Forwards output from stdout (0) or stderr (1); returns the messages, and whether the stream has ended."""
        try:
            data = os.read(self._pipes[stream].fileno(), 1 << 16)
        except BlockingIOError:
            return [], False
        messages: list[FromLauncher] = []
        printed = data
        if stream == 0:
            messages, printed = self._splitter.feed(data)
        else:
            self._errors = (self._errors + data)[-_TAIL_BYTES:]
        self._lines[stream].feed(printed)
        return messages, not data

    def send(self, message: ToLauncher) -> None:
        """Sends a message to the launcher; does nothing if the launcher has exited."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stdin.write(encode_to_launcher(message))
            self._stdin.flush()

    def exit_code(self) -> int | None:
        """Returns the exit code of the local process, or None while it is running."""
        return self._process.poll()

    def disconnect(self) -> None:
        """Closes the connection; the launcher then stops its workers and exits."""
        self._close_stdin()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def drain(self) -> list[FromLauncher]:
        """Forwards the remaining output from an exited process; returns the messages in this output."""
        messages: list[FromLauncher] = []
        for stream in range(2):
            # Another process, such as an ssh helper, may keep the pipe open.
            while select.select([self._pipes[stream]], [], [], 0)[0]:
                more, has_ended = self.read(stream)
                messages += more
                if has_ended:
                    break
        self._lines[0].feed(self._splitter.close())
        for lines in self._lines:
            lines.close()
        return messages

    def close(self) -> None:
        """Terminates the process if it is still running, and closes the pipes."""
        if self._process.poll() is None:
            self.disconnect()
            self._process.wait()
        self._close_stdin()
        for pipe in self._pipes:
            pipe.close()

    def _close_stdin(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


def command_for(attempt: LaunchAttempt, ssh: Sequence[str]) -> list[str]:
    """Returns the command that starts the launcher on a machine."""
    far_end = [attempt.python, "-c", FAR_END]
    return far_end if attempt.is_here else [*ssh, *SSH_OPTIONS, attempt.destination, f"exec {shlex.join(far_end)}"]


def is_here(host: Host) -> bool:
    """Returns True if a name refers to this machine and contains no login name, so that ssh is not needed."""
    if host.user is not None:
        return False
    if host.name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host.name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # the name may be an alias in ssh's configuration
    return any(_is_mine(family, address) for family, _, _, _, address in found)


def _is_mine(family: int, address: object) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)  # type: ignore[arg-type]  # as getaddrinfo returned it
        return True
    return False


def hosts_of(text: str) -> tuple[Host, ...]:
    """Parses the value of `--hosts`: a list of machines, or the name of a host file.

    >>> [(host.destination, host.slots) for host in hosts_of("a:4,anna@b:2,c")]
    [('a', 4), ('anna@b', 2), ('c', None)]
    """
    if os.path.isfile(text):
        try:
            return hosts_of_file(Path(text).read_text(), text)
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--hosts {text} cannot be read: {error}") from error
    if "/" in text:
        raise OptionError(f"--hosts {text}: the file does not exist")
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise OptionError("--hosts lists no machine; pass HOST:N,HOST:N or the name of a host file")
    return _together(_host_of(word, "--hosts") for word in words)


def hosts_of_file(text: str, name: str) -> tuple[Host, ...]:
    """Parses a host file, whose lines are HOST, HOST:N or HOST slots=N, with comments after #."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if words:
            found.append(_host_of_line(words, f"{name}:{number}"))
    if not found:
        raise OptionError(f"{name} lists no machine; it needs lines such as `node1 slots=4`")
    return _together(found)


def _host_of(word: str, where: str) -> Host:
    parts = _NAME.fullmatch(word)
    if parts is None:
        raise OptionError(
            f"{where}: {word!r} is neither HOST nor HOST:N with N workers; a login name precedes it (anna@HOST), and "
            "an IPv6 address is enclosed in brackets"
        )
    slots = int(parts["slots"]) if parts["slots"] is not None else None
    if slots == 0:
        raise OptionError(f"{where}: {word!r} has no workers; leave the machine out")
    return Host(parts["host"].strip("[]"), parts["user"], slots)


def _host_of_line(words: list[str], where: str) -> Host:
    host = _host_of(words[0], where)
    user, slots = host.user, host.slots
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if equals and key in _COUNTS and (count := whole_number(value, least=1)) is not None:
            slots = count
        elif equals and key in _USERS and re.fullmatch(r"[\w.+-]+", value):
            user = value
        elif not equals or key not in _IGNORED:
            raise OptionError(f"{where}: {word!r} is not known; a line is HOST, HOST:N or HOST slots=N")
    return Host(host.name, user, slots)


def _together(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Merges duplicate entries: returns each machine once, with the total number of workers."""
    entries: dict[tuple[str, str | None], list[int | None]] = {}
    for host in hosts:
        entries.setdefault((host.name, host.user), []).append(host.slots)
    return tuple(
        Host(name, user, slots[0] if len(slots) == 1 else sum(count or 1 for count in slots))
        for (name, user), slots in entries.items()
    )
