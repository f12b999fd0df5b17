"""Runs one machine's launcher: it follows the meeting's orders, passes on output and signals, and cleans up."""

from __future__ import annotations

import hmac
import os
import selectors
import signal
import socket
import time
from pathlib import Path

from paceline import __version__
from paceline.launch.cleanup import Cleanup
from paceline.launch.environment import free_port
from paceline.launch.events import Events
from paceline.launch.failures import Failure, report_parts, shortened
from paceline.launch.generation import CONSEQUENCES_S, Generation
from paceline.launch.job import Job
from paceline.launch.keyboard import Keyboard
from paceline.launch.logs import Logs
from paceline.launch.machine import Machine
from paceline.launch.nodes.meeting import NodeConnection, open_meeting
from paceline.launch.nodes.messages import End, Failed, Finished, Join, Leave, Order, Start, Stop, Stopped, Wait
from paceline.launch.output import Console
from paceline.launch.shared_secret import SharedSecret, secret_of
from paceline.launch.signals import Signals
from paceline.launch.start_workers import start_workers
from paceline.security.inherited import VARIABLE as SECRET_FD
from paceline.security.inherited import SecretFile
from paceline.store.server import StoreServer

# Variables of the job around this launcher, if a worker started it; the launcher's own workers must not use them.
_NOT_PASSED_ON = (
    "PACELINE_SECRET",
    "PACELINE_SECRET_FILE",
    SECRET_FD,
    "PACELINE_STORE",
    "PACELINE_TERMINAL",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def run(job: Job, listener: socket.socket | None = None, secret: bytes | None = None) -> int:
    """Runs this machine's part of the job to its end; returns the exit code for the shell.

    Args:
        job: what to run.
        listener: the socket to serve the meeting on, if the caller has opened it already.
        secret: the job's secret. By default it is new on a single machine; several machines take it from the
            environment, or under Slurm from launcher 0.

    Raises:
        PacelineError, ValueError: the machines did not meet.
    """
    cleanup = Cleanup()
    connection = None
    shared = SharedSecret(os.environ)
    try:
        if secret is None:
            secret = secret_of(job, shared, Console().say)
        connection = open_meeting(job, secret, Console().say, listener)
        with _Agent(job, connection, secret, shared, cleanup) as agent:
            return agent.run()
    finally:
        shared.close()
        if connection is not None:
            connection.close()
        cleanup.close()


class _Agent:
    def __init__(
        self, job: Job, connection: NodeConnection, secret: bytes | None, shared: SharedSecret, cleanup: Cleanup
    ) -> None:
        self._job = job
        self._connection = connection
        self._secret = secret
        self._shared = shared
        self._cleanup = cleanup
        self._machine = Machine.mine(job)
        self._keyboard = Keyboard()
        others = (signal.SIGWINCH, signal.SIGTSTP) if self._keyboard.is_terminal else (signal.SIGWINCH,)
        self._signals = Signals(job.signals, others)
        self._console = Console(lambda: self._signals.has_come)
        self._say = self._console.say
        self._logs = Logs(job.output, job.run_id, self._console)
        self._events = Events(job.events, job.run_id, self._console)
        self._generation: Generation | None = None
        self._store: StoreServer | None = None
        self._secret_fd = -1
        self._stopped_by: signal.Signals | None = None
        self._interrupted: set[int] = set()  # ranks that were sent a Ctrl-C of their own
        self._was_told_to_stop = False
        self._end: End | None = None
        self._world = range(0)  # the ranks of the latest generation
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Agent:
        self._selector.register(self._signals.fileno(), selectors.EVENT_READ, self._on_signal)
        self._selector.register(self._connection.client.fileno(), selectors.EVENT_READ, self._on_orders)
        return self

    def __exit__(self, *_: object) -> None:
        self._close_generation()
        self._selector.close()
        self._signals.close()

    def run(self) -> int:
        job = self._job
        for line in self._machine.remarks(job):
            self._say(line)
        self._connection.client.send(
            Join(
                host=socket.gethostname(),
                pid=os.getpid(),
                address=self._connection.address,
                port=free_port(self._connection.address),
                workers=job.workers,
                role=job.role,
                node_rank=job.rendezvous.node_rank,
                serves=self._connection.server is not None or job.rendezvous.address is None,
                version=__version__,
            )
        )
        while self._end is None or self._generation is not None:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fd in self._selector.get_map():  # not closed by one before it
                    key.data()
            self._on_time()
        return self._conclude(self._end)

    def _wait_s(self) -> float | None:
        deadlines = [self._connection.client.deadline_s, self._generation.deadline_s if self._generation else None]
        known = [each for each in deadlines if each is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _on_time(self) -> None:
        now_s = time.monotonic()
        deadline_s = self._connection.client.deadline_s
        if deadline_s is not None and now_s >= deadline_s:
            self._on_orders()
        if self._generation is not None:
            self._generation.tick(now_s)
            if self._generation.is_over:
                self._on_generation_over(self._generation)

    def _on_orders(self) -> None:
        for order in self._connection.client.receive():
            self._follow(order)

    def _follow(self, order: Order) -> None:
        match order:
            case Start():
                self._start(order)
            case Stop(number, reason, is_failure) if self._generation is not None and self._generation.number == number:
                self._was_told_to_stop = True
                if not self._generation.failures:
                    self._say(f"{reason}; ending the workers of this machine")
                self._generation.end(after_s=CONSEQUENCES_S if is_failure else 0.0)
            case Wait(reason):
                self._events.tell("wait", reason=reason)
                self._say(reason)
            case End() if self._end is None:
                self._end = order
                if self._generation is not None:
                    self._generation.end()

    def _start(self, start: Start) -> None:
        self._was_told_to_stop = False
        if self._job.rendezvous.is_static:
            self._shared.close()  # all have come, so all have read it
        self._world = range(start.world_size)
        first, count = start.first_rank, self._job.workers
        self._events.tell("start", generation=start.generation, ranks=list(range(first, first + count)))
        if start.group_world_size > 1:
            self._say(
                f"generation {start.generation}: ranks {first} to {first + count - 1} of {start.world_size} here; "
                f"machines {', '.join(start.hosts)}; MASTER {start.master_addr}:{start.master_port}"
            )
        self._generation = start_workers(
            self._job,
            start,
            self._environment(start),
            pass_fds=[self._secret_fd] if self._secret_fd >= 0 else [],
            directory=self._cleanup.directory,
            cores=self._machine.cores,
            gpus=self._machine.gpus,
            logs=self._logs,
            keyboard=self._keyboard,
            selector=self._selector,
            on_start=self._cleanup.watch,
            on_failure=lambda failure: self._on_failure(start, failure),
        )

    def _environment(self, start: Start) -> dict[str, str]:
        """Returns the variables that all workers of a generation share.

        Each generation has a secret of its own, so that workers of older ones cannot connect.
        """
        environment = self._machine.environment(os.environ)
        for name in _NOT_PASSED_ON:
            environment.pop(name, None)
        environment.update(self._cleanup.variables(start.generation))
        environment.setdefault("PYTHONUNBUFFERED", "1")
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun
        secret = None
        if self._secret is not None:
            secret = hmac.digest(self._secret, b"workers of generation %d" % start.generation, "sha256")
            file = SecretFile.create(secret)
            self._secret_fd = file.fd
            environment[SECRET_FD] = str(file)
        if self._job.rendezvous.address is None:
            path = Path(self._cleanup.directory, f"store-{start.generation}")
            self._store = StoreServer.on_unix_path(str(path), secret)
            environment["PACELINE_STORE"] = f"unix:{path}"
        return environment

    def _on_failure(self, start: Start, failure: Failure) -> None:
        self._events.tell("failure", rank=failure.rank, pid=failure.pid, how=failure.how)
        if self._stopped_by is None and failure.rank in self._interrupted and failure.is_interrupt:
            self._stop(signal.SIGINT)
        if self._stopped_by is None:
            self._connection.client.send(Failed(start.generation, failure))

    def _on_generation_over(self, generation: Generation) -> None:
        number, failures = generation.number, tuple(generation.failures)
        self._close_generation()
        if self._stopped_by is not None:
            self._connection.client.send(Leave(self._stopped_by.name))
        elif failures or self._was_told_to_stop:
            self._connection.client.send(Stopped(number, free_port(self._connection.address), shortened(failures)))
        else:
            self._connection.client.send(Finished(number))

    def _close_generation(self) -> None:
        if self._generation is not None:
            self._generation.close()
            self._cleanup.end_generation(self._generation.number)
            self._generation = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._secret_fd >= 0:
            os.close(self._secret_fd)
            self._secret_fd = -1

    def _on_signal(self) -> None:
        numbers, others = self._signals.read()
        generation = self._generation
        if signal.SIGCHLD in others:
            workers = generation.workers if generation is not None else []
            self._cleanup.reap(each.pid for each in workers if each.exit_code is None)
        if signal.SIGWINCH in others and generation is not None:
            generation.resize()
        if signal.SIGTSTP in others:
            from paceline.launch.pausing import pause

            pause(generation, self._keyboard, self._signals)
            self._console.redraw()
        for number in numbers:
            if self._stopped_by is not None:
                if generation is not None:
                    generation.kill()
            elif number == signal.SIGINT and generation is not None and (worker := generation.interactive()):
                self._interrupted.add(worker.rank)
                os.kill(worker.pid, number)
            else:
                self._stop(number)

    def _stop(self, number: signal.Signals) -> None:
        self._stopped_by = number
        if self._generation is None:
            self._connection.client.send(Leave(number.name))
            return
        running = [worker for worker in self._generation.workers if worker.exit_code is None]
        if running:
            self._say(
                f"{number.name}: passed on to {len(running)} workers, which have {self._job.shutdown_timeout_s:g} s to "
                "end (again to kill them)"
            )
        self._generation.end(number)

    def _conclude(self, end: End | None) -> int:
        assert end is not None
        if self._stopped_by is not None:
            return 1
        self._events.tell("end", code=end.code)
        for part in report_parts(end.failures, self._world) if end.failures else ():
            self._say(part)
        if end.reason:
            self._say(end.reason)
        return end.code
