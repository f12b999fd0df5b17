"""`Forker`: starts workers, by default as forks of a template process that has finished the slow imports."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.linux import memfd_create
from paceline.operate.launch.workers import bootstrap, template
from paceline.operate.launch.workers.cleanup import kill_group
from paceline.operate.launch.workers.placement import Cores
from paceline.operate.launch.workers.worker import bind_process

_LARGEST_ANSWER = 4096
_ANSWER_S = 30.0  # timeout for forking a worker, after which the template process is replaced
_IMPORTS_S = 300.0  # timeout for the template's imports, after which workers are started without them
_LAST_ANSWER_S = 2.0
_MOST_TEMPLATES = 4


def python() -> str:
    """Returns the path of the workers' interpreter."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


@dataclass(frozen=True, eq=False)
class ForkRequest:
    """A worker to be started."""

    argv: Sequence[str]  # arguments for the bootstrap program
    variables: Mapping[str, str]  # added to those that all workers share
    streams: tuple[int | None, int, int]  # descriptors for stdin (None for an empty one), stdout and stderr
    cores: Cores | None  # cores to which the worker is bound
    on_start: Callable[[int], None]  # called with the process id
    channel: socket.socket | None = None  # the worker's end of a socket pair, closed here once the worker has started

    def fds(self, nothing: int) -> list[int]:
        """Returns the descriptors of the streams, with `nothing` for an empty stdin, and of the channel, if any."""
        stdin, stdout, stderr = self.streams
        channel = [] if self.channel is None else [self.channel.fileno()]
        return [nothing if stdin is None else stdin, stdout, stderr, *channel]


class Forker:
    """Starts workers one at a time, each in its own session, without blocking the launcher.

    If forking is not possible, each worker is started in a new interpreter, which takes as long as importing torch. The
    launcher becomes the parent of the workers, because it adopts orphaned processes.

    The template process imports `modules` and then `preload`, which the user chose. If `modules` is None, each worker
    is started in a new interpreter. `descriptors` is the limit on workers' file descriptors, if it differs from the
    launcher's.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        descriptors: tuple[int, int] | None,
        selector: selectors.BaseSelector,
        print_line: Callable[[str], None],
        modules: Sequence[str] | None,
        preload: Sequence[str] = (),
    ) -> None:
        self._environment = environment
        self._pass_fds = pass_fds
        self._descriptors = descriptors
        self._selector = selector
        self._print_line = print_line
        self._modules = tuple(modules or ())
        self._preload = tuple(preload)
        self._requests: deque[ForkRequest] = deque()
        self._current: ForkRequest | None = None
        self._requested_s = 0.0
        self._templates = 0
        self._is_ready = False
        self._opened_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if modules is not None:
            self._open()

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) at which `tick` must be called, or None."""
        if self._current is not None:
            return self._requested_s + _ANSWER_S
        return None if self._connection is None or self._is_ready else self._opened_s + _IMPORTS_S

    def tick(self, now_s: float) -> None:
        """Replaces a template process that does not respond."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return
        if self._current is not None:
            self._give_up(f"it has not answered for {_ANSWER_S:g} s", is_for_good=False)
        else:
            self._give_up(f"its imports take longer than {_IMPORTS_S:g} s", is_for_good=True)
        self._handle_next()

    def start(self, request: ForkRequest) -> None:
        """Starts a worker; `request.on_start` is called with its process id, now or later. May raise OSError."""
        self._requests.append(request)
        self._handle_next()

    def cancel(self) -> None:
        """Discards the requests for workers that have not been started."""
        while self._requests:
            _close_channel(self._requests.popleft())

    def finish(self) -> None:
        """Discards all requests except one for a worker that is being forked, and stops the template. Idempotent."""
        self.cancel()
        if self._current is not None and self._connection is not None:
            select.select([self._connection], [], [], _LAST_ANSWER_S)
            self.read()
        self.close()

    def read(self) -> None:
        """Handles the responses that have arrived."""
        while self._connection is not None:
            try:
                answer = self._connection.recv(_LARGEST_ANSWER)
            except BlockingIOError:
                return
            except OSError:
                answer = b""
            if self._current is not None and len(answer) == 4:
                request, self._current = self._current, None
                self._started(request, int.from_bytes(answer, "little"))
            elif answer == template.READY:
                self._is_ready = True
            elif answer:
                self._give_up_imports(answer.decode(errors="replace"))
            else:
                self._give_up("it has ended", is_for_good=False)
            self._handle_next()

    def close(self) -> None:
        """Stops the template process. Idempotent."""
        self.cancel()
        self._disconnect()
        if self._current is not None:
            _close_channel(self._current)
            self._current = None
        if self._nothing >= 0:
            os.close(self._nothing)
            self._nothing = -1

    def _open(self) -> None:
        self._templates += 1
        self._is_ready = False
        self._opened_s = time.monotonic()
        modules = [*self._modules, "--", *self._preload] if self._preload else self._modules
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [python(), template.__file__, str(os.getpid()), str(theirs.fileno()), *modules],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *self._pass_fds],
                start_new_session=True,
            )
        bind_process(self._process.pid, None, self._descriptors)
        self._selector.register(self._connection, selectors.EVENT_READ, self.read)

    def _handle_next(self) -> None:
        if self._connection is None:
            while self._requests:
                self._interpret(self._requests.popleft())
        elif self._is_ready and self._current is None and self._requests:
            self._current, self._requested_s = self._requests.popleft(), time.monotonic()
            wanted = {
                "argv": self._current.argv,
                "variables": dict(self._current.variables),
                "cores": self._current.cores,
            }
            with open(memfd_create("paceline-worker"), "w") as file:  # the arguments may not fit into a datagram
                json.dump(wanted, file)
                file.flush()
                file.seek(0)
                with contextlib.suppress(OSError):  # `read` detects that the template has exited
                    fds = [file.fileno(), *self._current.fds(self._nothing)]
                    socket.send_fds(self._connection, [template.READY], fds)

    def _interpret(self, request: ForkRequest) -> None:
        stdin, stdout, stderr, *channel = request.fds(self._nothing)
        variables = {**request.variables, **({template.CHANNEL: str(channel[0])} if channel else {})}
        process = subprocess.Popen(
            [python(), bootstrap.__file__, str(os.getpid()), *request.argv],
            env={**self._environment, **variables},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[*self._pass_fds, *channel],
            start_new_session=True,
        )
        process.returncode = 0  # the launcher reaps the process by its pid
        bind_process(process.pid, request.cores, self._descriptors)
        self._started(request, process.pid)

    def _started(self, request: ForkRequest, pid: int) -> None:
        _close_channel(request)
        request.on_start(pid)

    def _give_up_imports(self, reason: str) -> None:
        """Continues without the user's modules or, if there are none, without forking."""
        preload, self._preload = self._preload, ()
        if preload:
            reason += f", so --preload {','.join(preload)} is ignored"
        self._give_up(reason, is_for_good=not preload)

    def _give_up(self, reason: str, is_for_good: bool) -> None:
        """Replaces the template process, or starts new interpreters from now on."""
        pid = self._process.pid if self._process is not None else 0
        self._disconnect()
        if self._current is not None:
            self._requests.appendleft(self._current)
            self._current = None
        what = f"workers cannot be forked from process {pid}: {reason}"
        if is_for_good or self._templates >= _MOST_TEMPLATES:
            self._print_line(f"{what}. Each worker is a new interpreter from now on, which takes longer to start")
        else:
            self._print_line(f"{what}; starting another")
            self._open()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        if self._process is not None:
            if self._is_ready and self._current is None:  # the template exits by itself; its group may contain a worker
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LAST_ANSWER_S)
            if self._process.poll() is None:
                kill_group(self._process.pid, signal.SIGKILL)  # also kills a worker that is currently being forked
            self._process.wait()
            self._process = None


def _close_channel(request: ForkRequest) -> None:
    if request.channel is not None:
        request.channel.close()
