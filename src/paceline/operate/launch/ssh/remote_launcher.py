"""Program that `paceline run --hosts` runs on each machine to start the launcher and to stop it on request.

The launcher is a separate process, because a process that forks must not have a thread that receives messages. Instead,
this process receives the messages from the launching process, `paceline run --hosts`. End of file on stdin means that
the launching process has exited or the connection is closed; this process then stops the launcher. If this process is
killed, the kernel kills the launcher, and the launcher's guards kill the workers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping

from paceline import __version__
from paceline.comm.one_port.dialer import chosen_port
from paceline.comm.security.authenticated_listener import ListeningEndpoint
from paceline.linux import die_on_interrupt, die_with_parent
from paceline.operate.launch.option_types import OptionError
from paceline.operate.launch.ssh.protocol import (
    FromLauncher,
    LauncherExited,
    LauncherReady,
    NodeAssignment,
    RendezvousAddress,
    Signal,
    decode_to_launcher,
    encode_from_launcher,
)
from paceline.operate.launch.workers.job_control import Signals

_MARGIN_S = 15.0
_LOOK_S = 0.5
_ASSIGNMENT_S = 600.0


def main() -> int:
    """Requests an assignment from the launching process, starts a launcher, and returns the launcher's exit code."""
    control = _Control()
    send_to_ssh_launcher(LauncherReady(__version__, sys.executable))
    part = control.receive_assignment()
    if part is None:
        return 1
    me = os.getpid()
    launcher = os.fork()
    if launcher == 0:
        die_with_parent(me)
        control.close()
        return _launch(part)
    code = _attend(launcher, control, part.shutdown_s)
    send_to_ssh_launcher(LauncherExited(code))
    return code


def send_to_ssh_launcher(message: FromLauncher) -> None:
    """Sends a message to the launching process; does nothing if that process has exited."""
    data = encode_from_launcher(message)
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


class _Control:
    """Reader for the launching process's messages. The launcher and its workers get an empty stdin instead."""

    def __init__(self) -> None:
        self._fd = os.dup(0)
        os.set_inheritable(self._fd, False)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        self._received = b""

    def close(self) -> None:
        """Closes the descriptor in the launcher, which must not keep the connection open."""
        os.close(self._fd)

    def receive_assignment(self) -> NodeAssignment | None:
        """Waits for this machine's assignment; returns None if the launching process sends no assignment."""
        deadline_s = time.monotonic() + _ASSIGNMENT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not select.select([self._fd], [], [], left_s)[0]:
                break
            lines = self.lines()
            if lines is None:
                return None
            if lines:
                message = decode_to_launcher(lines[0])
                # any other message is a signal, after which the job ends
                return message if isinstance(message, NodeAssignment) else None
        return None

    def fileno(self) -> int:
        """Returns the descriptor of the stream."""
        return self._fd

    def lines(self) -> list[bytes] | None:
        """Reads available data and returns the complete lines, or None at the end of the stream."""
        data = os.read(self._fd, 1 << 16)
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return lines


def _attend(launcher: int, control: _Control, shutdown_s: float) -> int:
    """Forwards signals to the launcher until the launcher exits; returns the launcher's exit code."""
    signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
    sources: list[Signals | _Control] = [signals, control]
    kill_by_s = float("inf")
    while True:
        ended, status = os.waitpid(launcher, os.WNOHANG)
        if ended:
            signals.close()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if time.monotonic() >= kill_by_s:
            os.kill(launcher, signal.SIGKILL)  # the launcher's guards then kill the workers
        readable, _, _ = select.select(sources, [], [], _LOOK_S)
        if signals in readable:
            for number in signals.read()[0]:
                os.kill(launcher, number)
        if control not in readable:
            continue
        lines = control.lines()
        if lines is None:
            sources.remove(control)
            kill_by_s = time.monotonic() + shutdown_s + _MARGIN_S
            os.kill(launcher, signal.SIGTERM)
        for line in lines or []:
            message = decode_to_launcher(line)
            if isinstance(message, Signal):
                os.kill(launcher, signal.Signals[message.name])


def _launch(part: NodeAssignment) -> int:
    die_on_interrupt()
    from paceline.operate.launch.command import add_run_arguments, run_command
    from paceline.operate.launch.flags import Parser

    os.environ.update(part.environment)
    parser = Parser(prog="paceline run")
    parser.add_argument("--use-env", "--use_env", action="store_true")  # accepted by `python -m paceline.launch`
    add_run_arguments(parser, os.environ)
    options = parser.parse_args(part.words)
    return run_command(options, lambda given: _take_part(given, part))


def _take_part(options: argparse.Namespace, part: NodeAssignment) -> int:
    from paceline.operate.launch.command import choose_security
    from paceline.operate.launch.job import job_of
    from paceline.operate.launch.worker_group_launcher import run

    _enter(part.directory)
    options.passes_local_rank = part.passes_local_rank
    options.nproc_per_node = part.workers or options.nproc_per_node
    options.rdzv_id = part.run_id
    choose_security(options)
    secret = None if part.secret is None else bytes.fromhex(part.secret)
    options.port = options.port if options.port is not None else chosen_port()
    listener: ListeningEndpoint | None = None
    options.nnodes = (part.nodes, part.nodes)
    if part.nodes > 1:
        rendezvous = part.rendezvous
        if rendezvous is None:
            listener, rendezvous = _open_rendezvous(options, part, secret)
            send_to_ssh_launcher(RendezvousAddress(*rendezvous))
        options.node_rank, options.rdzv_backend = part.node_rank, "static"
        options.master_addr, options.master_port = rendezvous
        options.rdzv_conf = {**options.rdzv_conf, "is_host": str(int(part.rendezvous is None))}
    # The machines were listed in `--hosts`, so a scheduler's variables on this machine may describe a different job.
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    job = job_of(options, {name: os.environ[name]} if name in os.environ else {})
    return run(job, listener, secret if part.nodes > 1 else None)


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise OptionError(
            f"{socket.gethostname()} has no accessible directory {directory} ({error.strerror}); put the script into "
            "the same directory on all machines, or specify its directory with --remote-dir"
        ) from error


def _open_rendezvous(
    options: argparse.Namespace, part: NodeAssignment, secret: bytes | None
) -> tuple[ListeningEndpoint | None, tuple[str, int]]:
    """Returns a listener for the rendezvous, and an address at which the other machines can reach it.

    The listener is None in a job with a single port, because the launcher opens that port itself.
    """
    from paceline.comm.store.tcp_store import listen

    host = options.local_addr or options.master_addr or address_toward(part.toward, os.environ)
    if options.port is not None:
        return None, (host, options.master_port or options.port)
    listener = listen(host, options.master_port or 0, secret)
    return listener, (host, listener.getsockname()[1])


def address_toward(name: str, environment: Mapping[str, str]) -> str:
    """Returns an address at which another machine can reach this one, based on the route or the ssh connection."""
    from paceline.comm.one_port.dialer import source_address
    from paceline.comm.security.secret import is_loopback
    from paceline.operate.launch.multinode.node_connection import own_address

    with contextlib.suppress(OSError):
        found = source_address(name)
        if not is_loopback(found):
            return found
    connection = environment.get("SSH_CONNECTION", "").split()  # client address and port, server address and port
    if len(connection) == 4 and not is_loopback(connection[2]):
        return connection[2]
    return own_address()
