"""`Forker`: starts the workers of an elastic job as forks of a template process that has imported torch."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.operate.launch.workers import template
from paceline.operate.launch.workers.cleanup import kill_group
from paceline.operate.launch.workers.start_workers import InterpreterStarter, WorkerSpec, python, request_of
from paceline.operate.launch.workers.worker import bind_process

# Imported before workers are forked. The first optimizer of a process imports torch._dynamo, which takes as long as
# torch itself.
MODULES = ("torch", "torch._dynamo", "paceline.train.elastic.worker.elastic_state")

_LARGEST_ANSWER = 4096
_ANSWER_S = 30.0  # time after which a template that has not forked a worker is replaced
_MOST_TEMPLATES = 4


@dataclass(frozen=True)
class ForkRequest:
    """A worker to be started.

    Attributes:
        prepared: The worker's arguments, variables and streams.
        channel: The worker's end of its socket pair, which is closed once the worker has started.
        on_start: A function that is called with the process id.
    """

    prepared: WorkerSpec
    channel: socket.socket
    on_start: Callable[[int], None]


class Forker:
    """Forks workers sequentially, without blocking the launcher.

    Where forking is impossible, each worker is a new interpreter, which takes as long as importing torch.

    Args:
        environment: The variables that all workers share.
        pass_fds: The descriptors that they inherit.
        descriptors: Their limit of descriptors, if it differs from the launcher's.
        selector: The launcher's event loop.
        say: A function that prints a line for the user.
        forks: Whether to fork at all.
        preload: Modules to import before forking, besides `MODULES`.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        descriptors: tuple[int, int] | None,
        selector: selectors.BaseSelector,
        say: Callable[[str], None],
        forks: bool = True,
        preload: Sequence[str] = (),
    ) -> None:
        self._environment = environment
        self._pass_fds = pass_fds
        self._descriptors = descriptors
        self._selector = selector
        self._say = say
        self._preload = tuple(preload)
        self._requests: deque[ForkRequest] = deque()
        self._asked: ForkRequest | None = None
        self._asked_s = 0.0
        self._templates = 0
        self._is_ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if forks:
            self._open()

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) at which `tick` must be called, or None."""
        return None if self._asked is None else self._asked_s + _ANSWER_S

    def tick(self, now_s: float) -> None:
        """Replaces a template process that does not answer."""
        if self._asked is not None and now_s >= self._asked_s + _ANSWER_S:
            self._give_up(f"it has not answered for {_ANSWER_S:g} s", is_for_good=False)
            self._go_on()

    def start(self, request: ForkRequest) -> None:
        """Starts a worker; `request.on_start` is called with its process id, now or later.

        Raises:
            OSError: No process can be started.
        """
        self._requests.append(request)
        self._go_on()

    def cancel(self) -> None:
        """Discards the requests that have not been started."""
        for request in self._requests:
            request.channel.close()
        self._requests.clear()

    def read(self) -> None:
        """Handles the answers that have arrived."""
        while self._connection is not None:
            try:
                answer = self._connection.recv(_LARGEST_ANSWER)
            except BlockingIOError:
                return
            except OSError:
                answer = b""
            if self._asked is not None and len(answer) == 4:
                request, self._asked = self._asked, None
                self._started(request, int.from_bytes(answer, "little"))
            elif answer == template.READY:
                self._is_ready = True
            elif answer:
                self._give_up_threads(answer.decode(errors="replace"))
            else:
                self._give_up("it has ended", is_for_good=False)
            self._go_on()

    def close(self) -> None:
        """Ends the template process. Idempotent."""
        self.cancel()
        if self._asked is not None:
            self._asked.channel.close()
            self._asked = None
        self._disconnect()
        if self._nothing >= 0:
            os.close(self._nothing)
            self._nothing = -1

    def _open(self) -> None:
        self._templates += 1
        self._is_ready = False
        modules = [*MODULES, "--", *self._preload] if self._preload else MODULES
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

    def _go_on(self) -> None:
        if self._connection is None:
            while self._requests:
                self._interpret(self._requests.popleft())
        elif self._is_ready and self._asked is None and self._requests:
            self._asked, self._asked_s = self._requests.popleft(), time.monotonic()
            prepared = self._asked.prepared
            request = request_of(prepared.argv, prepared.variables, prepared.cores)
            fds = [*prepared.streams(self._nothing), self._asked.channel.fileno()]
            with contextlib.suppress(OSError):  # `read` detects that it has ended
                socket.send_fds(self._connection, [request], fds)

    def _interpret(self, request: ForkRequest) -> None:
        prepared, channel = request.prepared, request.channel.fileno()
        starter = InterpreterStarter(self._environment, [*self._pass_fds, channel], self._descriptors)
        variables = {**prepared.variables, "PACELINE_ELASTIC_FD": str(channel)}
        pid = starter.start(prepared.argv, variables, prepared.streams(self._nothing), prepared.cores)
        self._started(request, pid)

    def _started(self, request: ForkRequest, pid: int) -> None:
        request.channel.close()
        request.on_start(pid)

    def _give_up_threads(self, names: str) -> None:
        """Continues without the user's modules, or without forks if there are none to leave out."""
        why, asked = f"it has threads after its imports ({names})", self._preload
        self._preload = ()
        if asked:
            why += f", so --preload {','.join(asked)} is left out"
        self._give_up(why, is_for_good=not asked)

    def _give_up(self, why: str, is_for_good: bool) -> None:
        """Replaces the template process, or starts new interpreters from now on."""
        pid = self._process.pid if self._process is not None else 0
        self._disconnect()
        if self._asked is not None:
            self._requests.appendleft(self._asked)
            self._asked = None
        what = f"the process that workers are forked from (pid {pid}) is of no use: {why}"
        if is_for_good or self._templates >= _MOST_TEMPLATES:
            self._say(f"{what}. Each worker is a new interpreter from now on, so replacements take longer")
        else:
            self._say(f"{what}; another is started")
            self._open()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        if self._process is not None:
            if self._process.poll() is None:
                kill_group(self._process.pid, signal.SIGKILL)  # with a worker that is just being forked
            self._process.wait()
            self._process = None
