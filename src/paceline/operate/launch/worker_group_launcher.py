"""`WorkerGroupLauncher` for jobs whose workers restart together, and `run`, the entry point for all jobs."""

from __future__ import annotations

import hmac
import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.comm.security.authenticated_listener import ListeningEndpoint
from paceline.comm.security.secret import SECRET_FD_VARIABLE as SECRET_FD
from paceline.comm.security.secret import SecretFile
from paceline.comm.store.tcp_store import listen
from paceline.errors import RendezvousTimeoutError, StoreConnectionError
from paceline.linux import interrupts_raised
from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.failures import WorkerFailure, describe_signal, read_exit, shortened
from paceline.operate.launch.job import Job, RendezvousOptions
from paceline.operate.launch.launcher import Launcher, Workers
from paceline.operate.launch.multinode.diagnosis_collector import DashboardRelay, DiagnosisCollector
from paceline.operate.launch.multinode.membership import JobController, Membership, MembershipPolicy
from paceline.operate.launch.multinode.node_connection import (
    JobMovedError,
    LocalClient,
    NodeConnection,
    host_to_serve_on,
)
from paceline.operate.launch.multinode.protocol import (
    JobEnded,
    JobMoved,
    NodeStopped,
    Order,
    SnapshotReport,
    Start,
    Stop,
    WorkerFailed,
    WorkersFinished,
    WorkersStopped,
)
from paceline.operate.launch.multinode.server import RendezvousServer
from paceline.operate.launch.shared_secret import SlurmSecret, secret_of
from paceline.operate.launch.watchdog import ending_of, final_snapshot
from paceline.operate.launch.workers.cleanup import Cleanup
from paceline.operate.launch.workers.output import Console
from paceline.operate.launch.workers.start_workers import WorkerContext, start_workers
from paceline.operate.launch.workers.worker import WorkerProcess
from paceline.operate.launch.workers.worker_group import CONSEQUENCES_S, WorkerGroup
from paceline.operate.launch.workers.worker_stores import WorkerStores, open_multiplexer, require_port
from paceline.train.checkpoint.peer_memory.server import VARIABLE as COPIES
from paceline.train.elastic.protocol import NotifyOrder

if TYPE_CHECKING:
    from paceline.operate.diagnosis.job_snapshot import RankExitStatus


def run(job: Job, listener: ListeningEndpoint | None = None, secret: bytes | None = None) -> int:
    """Runs this machine's part of the job to completion; returns the exit code for the shell.

    `listener` is an open listener for the rendezvous, or None. By default, a single machine creates a secret; several
    machines use the secret in the environment or, under Slurm, the secret created by launcher 0.

    Raises:
        PacelineError, ValueError: the machines' rendezvous failed.
    """
    cleanup = Cleanup()
    try:
        # Under Slurm, the secret is stored in files. Ctrl-C raises an exception, so that the files are removed even if
        # Ctrl-C interrupts the rendezvous. In other jobs, before `Launcher` installs its signal handlers,
        # Ctrl-C kills this process, and the guards clean up.
        is_in_files = secret is None and job.scheduler is not None and job.scheduler.is_slurm
        with open_multiplexer(job), interrupts_raised() if is_in_files else nullcontext():
            return _run(job, listener, secret, cleanup)
    finally:
        cleanup.close()


def _run(job: Job, listener: ListeningEndpoint | None, secret: bytes | None, cleanup: Cleanup) -> int:
    shared = SlurmSecret(os.environ)
    try:
        if secret is None:
            secret = secret_of(job, shared, Console().print_line)
        until_s = time.monotonic() + job.rendezvous.join_timeout_s
        while True:
            try:
                code, moved = _take_part(job, listener, secret, shared, cleanup)
            except JobMovedError as error:
                if time.monotonic() >= until_s:
                    raise RendezvousTimeoutError(
                        "a job is already running, but its coordinator could not be reached for "
                        f"{job.rendezvous.join_timeout_s:.0f} s ({error}). Check that no firewall blocks the connection"
                    ) from error
                Console().print_line(
                    f"the job that is already running cannot be reached ({error}); looking for it again"
                )
                moved = None
            else:
                if moved is None:
                    return code
            running = (moved.job, moved.address) if moved is not None else None
            job, listener = replace(job, rendezvous=replace(job.rendezvous, running=running)), None
    finally:
        shared.close()


def _take_part(
    job: Job, listener: ListeningEndpoint | None, secret: bytes | None, shared: SlurmSecret, cleanup: Cleanup
) -> tuple[int, JobMoved | None]:
    """Runs this machine's part of the job; returns the exit code, and the job to join instead (if any)."""
    connection = open_rendezvous(job, secret, Console().print_line, listener)
    try:
        if job.one_port is not None:
            require_port(connection.address, secret)
        kind: type[Launcher] = WorkerGroupLauncher
        if job.elastic is not None:
            from paceline.operate.launch.elastic.elastic_agent import ElasticAgent

            kind = ElasticAgent
        with kind(job, connection, secret, shared, cleanup) as launcher:
            return launcher.run(), launcher.moved
    finally:
        connection.close()


class WorkerGroupLauncher(Launcher):
    """Runs generations of workers. The workers in a generation start and stop together."""

    def __init__(
        self, job: Job, connection: NodeConnection, secret: bytes | None, shared: SlurmSecret, cleanup: Cleanup
    ) -> None:
        super().__init__(job, connection, secret, shared, cleanup)
        self._generation: WorkerGroup | None = None
        self._stores = WorkerStores(job, connection.address, secret, self._print_line)
        self._secret_fd = -1
        self._interrupted: set[int] = set()  # ranks that received a forwarded Ctrl-C
        self._is_stop_requested = False
        self._has_explained = False  # whether a failure in this generation has been diagnosed
        self._has_looked = False  # whether the workers were examined because of a rank that left its group
        self._started_s = 0.0  # start time of the generation (monotonic)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._stores.close()

    def _ports(self) -> tuple[int, int]:
        return self._stores.reserve()

    def _running_workers(self) -> Workers | None:
        return self._generation

    def _watched(self) -> list[WatchedWorker]:
        if self._generation is None:
            return []
        failures = {**self._generation.exceptions, **{failure.rank: failure for failure in self._generation.failures}}

        def ending(worker: WorkerProcess) -> RankExitStatus | None:
            failure = failures.get(worker.rank)
            has_ended = worker.exit_code is not None or failure is not None
            exit_line = read_exit(worker.error_file)[0] if worker.exit_code == 0 else ""
            return ending_of(worker.exit_code or 0, failure, exit_line) if has_ended else None

        return [
            WatchedWorker(
                number=worker.rank,
                pid=worker.pid,
                recording=self._generation.recordings.get(worker.rank),
                ending=ending(worker),
                is_running=worker.exit_code is None,
                thread_error_file=f"{worker.error_file}.thread",
            )
            for worker in self._generation.workers
        ]

    def _is_over(self) -> bool:
        return self._end is not None and self._generation is None

    def _deadlines(self) -> list[float | None]:
        return [self._generation.deadline_s] if self._generation is not None else []

    def _tick(self, now_s: float) -> None:
        if self._generation is not None:
            self._generation.tick(now_s)
            if self._generation.is_over:
                self._on_generation_over(self._generation)

    def _follow(self, order: Order) -> None:
        match order:
            case Start():
                self._start(order)
            case Stop(number, reason, is_failure) if self._generation is not None and self._generation.number == number:
                self._is_stop_requested = True
                self._watcher.pause()
                if not self._generation.failures:
                    self._print_line(f"{reason}; stopping the workers on this machine")
                self._generation.end(after_s=CONSEQUENCES_S if is_failure else 0.0)
            case NotifyOrder(reason):
                self._events.write("wait", reason=reason)
                self._print_line(reason)
            case JobEnded() if self._end is None:
                self._end = order
                if self._generation is not None:
                    self._generation.end()

    def _start(self, start: Start) -> None:
        self._is_stop_requested = self._has_explained = self._has_looked = False
        self._started_s = time.monotonic()
        self._watcher.resume()
        if self._job.rendezvous.is_static:
            self._shared.close()  # all machines are present, so all have read the shared secret
        self._world = range(start.world_size)
        self._dashboard.generation(start.world_size, start.restart_count)
        first, count = start.first_rank, self._job.workers
        self._directory.note(job=start.run_id, first_rank=first, world_size=start.world_size)
        self._events.write("start", generation=start.generation, ranks=list(range(first, first + count)))
        if start.group_world_size > 1:
            self._print_line(
                f"generation {start.generation}: ranks {first} to {first + count - 1} of {start.world_size} here; "
                f"machines {', '.join(start.hosts)}; MASTER {start.master_addr}:{start.master_port}"
            )
        context = WorkerContext(
            self._environment_of(start),
            pass_fds=[self._secret_fd] if self._secret_fd >= 0 else [],
            directory=self._cleanup.directory,
            cores=self._machine.cores,
            gpus=self._machine.gpus,
            logs=self._logs,
            keyboard=self._keyboard,
            recordings=self._recordings,
        )
        self._generation = start_workers(
            self._job,
            start,
            context,
            selector=self._selector,
            print_line=self._print_line,
            on_start=self._cleanup.watch,
            on_exception=self._on_exception,
            on_failure=lambda failure: self._on_failure(start, failure),
        )

    def _environment_of(self, start: Start) -> dict[str, str]:
        """Returns the workers' variables, with a new secret, so that workers from older generations cannot connect."""
        environment = self._environment(str(start.generation))
        secret = None
        if self._secret is not None:
            secret = hmac.digest(self._secret, b"workers of generation %d" % start.generation, "sha256")
            file = SecretFile.create(secret)
            self._secret_fd = file.fd
            environment[SECRET_FD] = str(file)
        environment |= self._stores.serve(start, secret, self._cleanup.directory)
        if (requests := self._stores.requests_fileno()) >= 0:
            self._selector.register(requests, selectors.EVENT_READ, self._open_torch_store)
        path = Path(self._cleanup.directory, f"copies-{start.generation}")
        environment[COPIES] = self._copies.open(str(path), secret)
        return environment

    def _open_torch_store(self) -> None:
        self._selector.unregister(self._stores.requests_fileno())
        self._stores.open_torch_store()

    def _on_exception(self, failure: WorkerFailure) -> None:
        """Diagnoses an exception in a worker that is still running.

        Mismatched calls are diagnosed only once all workers have raised exceptions, because only then is the line of
        each call known.
        """
        generation = self._generation
        assert generation is not None
        if failure.manner != "MISMATCH" or len(generation.exceptions) == len(generation.workers):
            self._explain(failure)

    def _explain(self, failure: WorkerFailure) -> None:
        """Takes a snapshot at once if the cause of a failure might already be known, because workers may exit slowly.

        A failure caused by another rank is explained if a rank has left early, on this or on another machine.
        """
        generation = self._generation
        assert generation is not None
        has_left = any(worker.exit_code == 0 for worker in generation.workers)
        is_cause = failure.manner != "CONSEQUENCE" or has_left or len(self._world) > len(generation.workers)
        if failure.is_interrupt or self._has_explained or self._stopped_by is not None:
            return
        if is_cause:
            self._has_explained = True
            self._watcher.start_failure_snapshot()
        elif failure.follows_departure and not self._has_looked:
            # The rank may still be running after destroying its group. Its location must be read before it is stopped.
            self._has_looked = True
            self._watcher.start_failure_snapshot()

    def _on_failure(self, start: Start, failure: WorkerFailure) -> None:
        self._explain(failure)
        self._watcher.pause()
        self._events.write("failure", rank=failure.rank, pid=failure.pid, how=failure.how)
        self._dashboard.record_exits()
        if self._stopped_by is None and failure.rank in self._interrupted and failure.is_interrupt:
            self._stop(signal.SIGINT)
        if self._stopped_by is None:
            self._connection.client.send(WorkerFailed(start.generation, failure))

    def _on_generation_over(self, generation: WorkerGroup) -> None:
        number, failures = generation.number, tuple(generation.failures)
        has_failed, lasted_s = bool(failures) or self._is_stop_requested, time.monotonic() - self._started_s
        is_useful = self._watcher.should_read_final_recordings(has_failed, lasted_s, len(generation.workers))
        # Ranks on other machines may still be waiting for these workers.
        if is_useful or (self._watcher.is_on and len(self._world) > len(generation.workers)):
            snapshot = final_snapshot(self._watched())
            if snapshot is not None and self._stopped_by is None:
                self._connection.client.send(SnapshotReport(snapshot, is_last=True, is_short=not is_useful))
        self._dashboard.record_exits()
        exited = [worker for worker in generation.workers if worker.exit_code == 0]
        lines = {worker.rank: line for worker in exited if (line := read_exit(worker.error_file)[0])}
        self._directory.note(exit_lines=lines)
        self._close_workers()
        if self._stopped_by is not None:
            self._connection.client.send(NodeStopped(self._stopped_by.name))
        elif failures or self._is_stop_requested:
            port, store_port = self._ports()
            self._connection.client.send(WorkersStopped(number, port, shortened(failures), store_port))
        else:
            self._connection.client.send(WorkersFinished(number))

    def _close_workers(self) -> None:
        if self._generation is not None:
            self._generation.close()
            self._cleanup.end_generation(str(self._generation.number))
            self._generation = None
        self._copies.shut()
        if (requests := self._stores.requests_fileno()) >= 0:
            self._selector.unregister(requests)
        self._stores.end_generation()
        if self._secret_fd >= 0:
            os.close(self._secret_fd)
            self._secret_fd = -1

    def _on_interrupt(self, worker: WorkerProcess) -> None:
        self._interrupted.add(worker.rank)

    def _stop(self, number: signal.Signals) -> None:
        self._stopped_by = number
        self._watcher.pause()
        if self._generation is None:
            self._connection.client.send(NodeStopped(number.name))
            return
        running = self._generation.pids()
        if running:
            self._print_line(describe_signal(number.name, len(running), self._job.shutdown_timeout_s))
        elif not self._generation.workers:
            self._print_line(f"{number.name}: the job ends before its workers have started")
        self._generation.end(number)


def open_rendezvous(
    job: Job, secret: bytes | None, print_line: Callable[[str], None], listener: ListeningEndpoint | None = None
) -> NodeConnection:
    """Connects this machine to the rendezvous; `listener` is the server's, if it is already open.

    Raises:
        StoreConnectionError: This machine should host the rendezvous but cannot.
        RendezvousTimeoutError: No launcher hosted the rendezvous before the timeout.
        AuthenticationError: The server does not have the job's secret.
        ValueError: The address is not a loopback address, and there is no secret.
    """
    options = job.rendezvous
    if options.address is None:
        collector = DiagnosisCollector(_controller(job), "rank" if job.elastic is None else "slot")
        return NodeConnection(LocalClient(DashboardRelay(collector)), "127.0.0.1")
    address = options.address
    server = None
    if listener is None and options.serves is not False:
        listener = _listener(options, address, secret)
    controller = _controller(job) if listener is not None and options.running is None else None
    if job.elastic is not None:
        from paceline.operate.launch.elastic.coordinator_client import join_elastic

        return join_elastic(job, job.elastic, secret, print_line, address, listener, _policy(job), controller)
    if listener is not None and controller is not None:
        relay = DashboardRelay(DiagnosisCollector(controller))
        server = RendezvousServer(listener, secret, relay, options.silence_s, bears_starvation=True)
        address = server.address
    from paceline.operate.launch.multinode.remote_client import connect_client  # not needed on a single machine

    try:
        client = connect_client(address, secret, options.join_timeout_s, options.silence_s, print_line)
    except BaseException:
        if server is not None:
            server.close(0.0)
        raise
    own = options.local_address or client.local_address.partition("%")[0]
    return NodeConnection(client, own, server, serves=server is not None)


def _controller(job: Job) -> JobController:
    policy, now_s = _policy(job), time.monotonic()
    if job.elastic is None:
        return Membership(policy, now_s)
    from paceline.operate.launch.elastic.elastic_controller import ElasticController

    return ElasticController(policy, job.elastic, now_s)


def _policy(job: Job) -> MembershipPolicy:
    options = job.rendezvous
    return MembershipPolicy(
        run_id=job.run_id,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        is_static=options.is_static,
        max_restarts=job.max_restarts,
        last_call_s=options.last_call_s,
        join_timeout_s=options.join_timeout_s,
        port=job.port,
        return_timeout_s=options.return_timeout_s,
        rendezvous_host_first=job.one_port is not None,
    )


def _listener(options: RendezvousOptions, address: tuple[str, int], secret: bytes | None) -> ListeningEndpoint | None:
    """Returns a listener if the address belongs to this machine and no other launcher already serves there."""
    host = host_to_serve_on(address[0], bool(options.serves))
    try:
        return None if host is None else listen(host, address[1], secret)
    except StoreConnectionError:
        if options.serves:
            raise
        return None  # for example, another launcher on this machine already hosts the rendezvous
