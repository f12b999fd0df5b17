"""`CoordinatorClient`: a launcher's connection to an elastic job's coordinator, and its search for a new coordinator.

`join_elastic` connects a launcher to a job on several machines, any of which can host the rendezvous later.
`RunningJobAnnouncer` announces the running job to a launcher that has been restarted at the rendezvous address.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from paceline.comm.security.authenticated_listener import ListeningEndpoint
from paceline.comm.security.encryption import Connection
from paceline.comm.security.handshake import HandshakeUnfinishedError
from paceline.comm.store.tcp_store import PortInUseError, listen
from paceline.errors import AuthenticationError
from paceline.operate.diagnosis.clock_offset import Offset
from paceline.operate.launch.elastic.elastic_controller import ElasticController
from paceline.operate.launch.elastic.machine_log import MachineLog, MachineState
from paceline.operate.launch.elastic.standby_controller import StandbyController
from paceline.operate.launch.elastic_options import ElasticOptions
from paceline.operate.launch.job import Job
from paceline.operate.launch.multinode.diagnosis_collector import DashboardRelay, DiagnosisCollector
from paceline.operate.launch.multinode.membership import JobController, MembershipPolicy
from paceline.operate.launch.multinode.node_connection import JobMovedError, NodeConnection, RendezvousClient
from paceline.operate.launch.multinode.protocol import (
    FollowLauncher,
    FollowResponse,
    Inbox,
    JobEnded,
    JobMoved,
    JobRunning,
    NodeDropped,
    Order,
    RecordFailures,
    Report,
    StartSlots,
    StateReplicated,
    encode,
)
from paceline.operate.launch.multinode.remote_client import (
    ServerConnection,
    connect,
    connect_in_time,
    lost_at,
    warn_of_running_job_at,
)
from paceline.operate.launch.multinode.server import RendezvousServer
from paceline.train.elastic.coordinator.election import (
    ConnectionLoss,
    ContactResult,
    CoordinatorSearch,
    JobDeserted,
    Pause,
    StopSearch,
    TryMachine,
)
from paceline.train.elastic.protocol import NotifyOrder, ReplicatedJobState, ReplicateOrder

_WORDS = {
    ContactResult.ENDED: "no process listens there",
    ContactResult.SILENT: "no answer",
    ContactResult.SEEKING: "it is also looking for one",
    ContactResult.ELSEWHERE: "it follows another coordinator",
    ContactResult.FOLLOWED: "too few workers can be reached from there",
}


class LauncherUnreachableError(Exception):
    """Raised if another launcher is unreachable. `answer` is the result of the attempt to contact that launcher."""

    def __init__(self, why: str, answer: ContactResult) -> None:
        super().__init__(why)
        self.answer = answer


def connect_to_launcher(address: str, secret: bytes | None, timeout_s: float) -> Connection:
    """Connects to the launcher at an address such as `node1:29500`, or raises a LauncherUnreachableError."""
    host, _, port = address.rpartition(":")
    try:
        return connect((host.strip("[]"), int(port)), secret, timeout_s)
    except ConnectionRefusedError as error:
        raise LauncherUnreachableError(str(error), ContactResult.ENDED) from error
    except (OSError, ValueError, HandshakeUnfinishedError, AuthenticationError) as error:
        raise LauncherUnreachableError(str(error), ContactResult.SILENT) from error


def addresses_of(known: ReplicatedJobState) -> dict[int, str]:
    """Returns the addresses of launchers that may be alive, by machine number."""
    return {peer.number: peer.address for peer in known.peers if peer.number not in known.ended}


def describe_attempts(known: ReplicatedJobState, answers: Mapping[int, ContactResult]) -> str:
    """Describes the results of contact attempts for the user."""
    hosts = {peer.number: peer.host for peer in known.peers}
    contacts = sorted(answers.items())
    return ", ".join(f"machine {number} on {hosts.get(number, '?')}: {_WORDS[answer]}" for number, answer in contacts)


_DIAL_S = 0.5
_ANSWER_S = 1.0
_TAKES_OVER_S = 2.0  # time during which a coordinator's designated successor remains a candidate
_REPORT_AFTER_S, _REPORT_INTERVAL_S = 2.0, 15.0


class CoordinatorClient(RendezvousClient):
    """A rendezvous client that survives the loss of its server and records data for the next coordinator.

    `standby` responds to the other launchers.
    """

    def __init__(self, connection: Connection, secret: bytes | None, job: Job, standby: StandbyController) -> None:
        super().__init__()
        self._secret, self._standby = secret, standby
        self._silence_s, self._seeks_s = job.rendezvous.silence_s, job.rendezvous.return_timeout_s
        self._changing = threading.RLock()
        self._state = MachineState(socket.gethostname(), job.workers)
        self._log = MachineLog(self._state)
        self._search = CoordinatorSearch(-1, self._seeks_s, random.random)
        self._closed = threading.Event()
        self._answered = threading.Event()
        self._answer = FollowResponse(False, -1)
        self._is_over = False
        self._is_asking = False
        self._report_at_s = 0.0
        self._leads = False  # whether the followed launcher is the coordinator, not just a candidate
        self._was_dropped = False
        self._leader = -1
        self._wire: ServerConnection | None = None
        self._announcer: RunningJobAnnouncer | None = None
        self.local_address: str = connection.getsockname()[0]
        with self._changing:
            self._listen_to(connection)

    def announce_at(self, address: tuple[str, int]) -> None:
        """Starts announcing the running job at the rendezvous address; see `RunningJobAnnouncer`."""
        self._announcer = RunningJobAnnouncer(address, self._secret, self.running, self._standby.is_here)

    def clock_offset(self) -> Offset | None:
        """Returns the estimated clock offset to the coordinator's machine."""
        with self._changing:
            return self._wire.clock_offset() if self._wire is not None else None

    def send(self, report: Report) -> None:
        """Sends a report and records it for the next coordinator."""
        with self._changing:
            self._log.reported(report)
            if self._wire is not None:
                self._wire.send(report)
            if self._log.leave is not None and self._search.has_lost:
                self._over(JobEnded(1))  # no coordinator is left to receive the report

    def running(self) -> JobRunning | None:
        """Returns the notice for launchers outside the running job, or None if another launcher sends the notice."""
        with self._changing:
            known = self._state.job_state
            if self._is_over or self._state.number < 0 or not known.views:
                return None
            running = self._standby.running()
            return JobRunning(known.job) if running is None and self._search.is_seeking else running

    def close(self) -> None:
        """Disconnects from the coordinator. Idempotent."""
        if self._announcer is not None:
            self._announcer.close()
        self._closed.set()
        self._answered.set()
        with self._changing:
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        super().close()

    def _listen_to(self, connection: Connection) -> ServerConnection:
        wire = ServerConnection(
            connection,
            self._silence_s,
            lambda order: self._on_order(wire, order),
            lambda loss, why: self._on_lost(wire, loss, why),
        )
        self._wire, self._leads, self._was_dropped = wire, False, False
        wire.start()
        return wire

    def _on_order(self, wire: ServerConnection, order: Order) -> None:
        """Handles an order. Any view in the order is recorded before it is forwarded to workers."""
        with self._changing:
            if self._wire is not wire or self._is_over:
                return
            self._log.ordered(order)
            match order:
                case FollowResponse():
                    self._answer = order
                    self._answered.set()
                case NodeDropped():
                    self._was_dropped = True
                case RecordFailures():
                    pass  # nothing to do, because `self._log` has recorded the order
                case ReplicateOrder():
                    self._replicate(wire, order.job_state)
                case FollowLauncher():
                    self._turn_over(wire, order)
                case _:
                    self._is_over = isinstance(order, JobEnded | JobMoved)
                    if isinstance(order, StartSlots):
                        self._search.me = order.machine
                    self.put(order)

    def _replicate(self, wire: ServerConnection, job_state: ReplicatedJobState) -> None:
        self._state.merge(job_state)
        self._standby.takes_part(self._state.job_state.job, self._state.number)
        self._leader, self._leads = job_state.coordinator, True
        peers = self._state.job_state.peers
        address = next((peer.address for peer in peers if peer.number == job_state.coordinator), "")
        self._standby.follows(job_state.coordinator, address)
        if self._search.is_seeking:
            self._search.found()
            self.put(NotifyOrder(f"machine {job_state.coordinator} coordinates"))
            if self._log.leave is not None:
                wire.send(self._log.leave)  # the previous coordinator may not have received the report
        wire.send(StateReplicated(job_state.views[-1].generation if job_state.views else 0))

    def _on_lost(self, wire: ServerConnection, loss: ConnectionLoss, why: str) -> None:
        with self._changing:
            if self._wire is not wire or self._is_over or self._closed.is_set():
                return
            self._wire = None
            self._answered.set()
            wire.close(lives_on=True)
            if self._is_asking:
                return
            if self._state.number < 0 and self._answer.address:
                self._begin(self._turn_to, self._answer.address)
                return
            if self._log.leave is not None or self._state.number < 0 or not self._state.job_state.views:
                self._over(JobEnded(1, lost_at(wire.peer, why)))
                return
            if self._was_dropped:
                loss = ConnectionLoss.DROPPED
            if not self._leads and loss in (ConnectionLoss.ENDED, ConnectionLoss.RESET):
                # that machine's workers may have received views that this launcher has not received
                loss = ConnectionLoss.SILENT
            self._seek_after(loss, wire.peer, "it gave up" if self._was_dropped else why)

    def _turn_over(self, wire: ServerConnection, order: FollowLauncher) -> None:
        """Follows the successor of a coordinator that is shutting down.

        If this launcher is the successor, it becomes a candidate first.
        """
        if self._state.number == order.number:
            self._standby.stand(order.number, _TAKES_OVER_S)
        self._wire = None
        wire.close(lives_on=True)
        if self._state.number < 0:
            self._begin(self._turn_to, order.address)
            return
        self._search.handed_over(order.number, time.monotonic())
        self._standby.follows(-1, "")
        self._report_at_s = time.monotonic() + _REPORT_AFTER_S
        if not self._is_asking:
            self._begin(self._seek)

    def _turn_to(self, address: str) -> None:
        """Joins the job at its current coordinator after a redirect from another launcher."""
        self._answer = FollowResponse(False, -1)
        try:
            connection = connect_to_launcher(address, self._secret, self._silence_s)
        except LauncherUnreachableError as error:
            self._over(JobEnded(1, lost_at(address, str(error))))
            return
        with self._changing:
            assert self._log.join is not None
            self._listen_to(connection).send(self._log.join)

    def _seek_after(self, loss: ConnectionLoss, peer: str, why: str) -> None:
        is_new = not self._search.is_seeking
        self._search.lost(self._leader, loss, time.monotonic())
        self._standby.follows(-1, "")
        if is_new:
            self._report_at_s = time.monotonic() + _REPORT_AFTER_S
            self.put(
                NotifyOrder(f"the coordinator at {peer} was lost ({why}); looking for another; the workers continue")
            )
        self._begin(self._seek)

    def _begin(self, task: Callable[..., None], *args: str) -> None:
        threading.Thread(target=task, args=args, name="paceline-seek", daemon=True).start()

    def _seek(self) -> None:
        """Searches until this launcher follows a coordinator or a candidate."""
        while not self._closed.is_set() and not self._is_over:
            with self._changing:
                known = self._state.job_state
                addresses = addresses_of(known)
                step = self._search.next(list(addresses), time.monotonic(), is_done=self._state.is_done)
                attempts = describe_attempts(known, self._search.answers)
                if self._log.leave is not None and self._search.has_lost:
                    step = StopSearch()
            match step:
                case StopSearch():
                    self._over(JobEnded(1, f"no coordinator was found for {self._seeks_s:.0f} s ({attempts})"))
                    return
                case JobDeserted():
                    self._over(self._deserted(attempts))
                    return
                case Pause(for_s):
                    if time.monotonic() >= self._report_at_s:
                        self._report_at_s = time.monotonic() + _REPORT_INTERVAL_S
                        self.put(NotifyOrder(f"still looking for a coordinator: {attempts}"))
                    self._closed.wait(for_s)
                case TryMachine(number, stand_s):
                    if stand_s:
                        self._standby.stand(number, stand_s)
                    if self._follow(number, addresses.get(number, "")):
                        return

    def _deserted(self, attempts: str) -> JobEnded:
        """Returns the result of a job that has no other launchers left."""
        if self._state.has_finished:
            return JobEnded(
                0,
                f"the job has finished: this machine's workers have completed, and no coordinator answers ({attempts})",
            )
        return JobEnded(
            1,
            f"the job seems to have ended: none of its launchers can be reached ({attempts}). Look at their output for "
            "the outcome; this machine had lost its connections to them, and its workers had not finished",
        )

    def _follow(self, number: int, address: str) -> bool:
        """Requests permission to follow another launcher; returns whether permission was granted."""
        answer, elsewhere = self._contact(number, address)
        with self._changing:
            has_ended = self._search.tried(number, answer, elsewhere)
            if has_ended:
                self._state.machine_ended(number)
        return answer is ContactResult.FOLLOWED

    def _contact(self, number: int, address: str) -> tuple[ContactResult, int | None]:
        try:
            connection = connect_to_launcher(address, self._secret, _DIAL_S)
        except LauncherUnreachableError as error:
            return error.answer, None
        self._answered.clear()
        self._answer = FollowResponse(False, -1)
        with self._changing:
            assert self._log.join is not None
            self._leader, self._is_asking = number, True
            wire = self._listen_to(connection)
            wire.send(msgspec.structs.replace(self._log.join, number=self._state.number))
            wire.send(self._log.follow())
        self._answered.wait(_ANSWER_S)
        with self._changing:
            self._is_asking = False
            if self._answer.is_welcome and self._wire is wire:
                return ContactResult.FOLLOWED, None
            if self._wire is wire:
                self._wire = None
        wire.close(lives_on=True)
        if self._answer.is_stranger:
            return ContactResult.ENDED, None
        there = self._answer.number
        return (ContactResult.SEEKING, None) if there < 0 else (ContactResult.ELSEWHERE, there)

    def _over(self, end: JobEnded) -> None:
        self._is_over = True
        self.put(end)


_PAUSE_S = 0.25
_LONG_PAUSE_S = 10.0  # pause after a response from a process without the job's secret


class RunningJobAnnouncer:
    """Announces a running job at the rendezvous address while none of the job's launchers listens there.

    A supervisor might restart the job's first launcher with the same command. The restarted launcher does not have the
    addresses of the other launchers, but these launchers have the rendezvous address, and resolve its host name again
    for each announcement. Announcements are sent from a separate thread. A launcher with another secret only receives a
    warning, which is not authenticated.

    Args:
        running: A function that returns the notice to send, or None while this launcher must not send a notice.
        is_here: A function that returns True if this launcher coordinates the job and a given machine is connected.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes | None,
        running: Callable[[], JobRunning | None],
        is_here: Callable[[int], bool],
    ) -> None:
        self._address, self._secret = address, secret
        self._running, self._is_here = running, is_here
        self._pause_s = _PAUSE_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-announcer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the announcements. Idempotent."""
        self._closed.set()
        self._thread.join(_DIAL_S)  # a process that accepts connections but does not respond must not delay the exit

    def _run(self) -> None:
        listens_there = -1  # number of the machine in the job that last responded
        while not self._closed.wait(self._pause_s):
            self._pause_s = _PAUSE_S
            running = self._running()
            if running is None or (listens_there >= 0 and self._is_here(listens_there)):
                continue
            try:
                listens_there = self._call(running)
            except (AuthenticationError, ValueError) as error:
                self._pause_s = _LONG_PAUSE_S
                if isinstance(error, AuthenticationError) and not isinstance(error, HandshakeUnfinishedError):
                    with contextlib.suppress(OSError, HandshakeUnfinishedError):
                        warn_of_running_job_at(self._address, _DIAL_S)
            except OSError:
                listens_there = -1

    def _call(self, running: JobRunning) -> int:
        """Returns the number of the machine in this job that listens on the address, or -1 if there is none."""
        with contextlib.closing(connect(self._address, self._secret, _DIAL_S)) as connection:
            if self._closed.is_set():
                return -1
            connection.sendall(encode(running))
            return _answer(connection, time.monotonic() + _ANSWER_S)


def _answer(connection: Connection, until_s: float) -> int:
    inbox = Inbox()
    while (left_s := until_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        data = connection.recv(1 << 16)
        for message in inbox.feed(data):
            if isinstance(message, FollowResponse):
                return message.number
        if not data:
            break
    return -1


_REACH_S = 5.0


def join_elastic(
    job: Job,
    options: ElasticOptions,
    secret: bytes | None,
    print_line: Callable[[str], None],
    address: tuple[str, int],
    listener: ListeningEndpoint | None,
    policy: MembershipPolicy,
    controller: JobController | None,
) -> NodeConnection:
    """Connects this machine to the rendezvous at `address`, or hosts the rendezvous on `listener` if it is not None.

    If the job is already running, this machine connects to its coordinator and redirects other launchers that connect
    to `address`. Every other machine listens on the same port, or on any free port if that port is taken, because it
    may become the coordinator later.
    """
    rendezvous = job.rendezvous
    standby = StandbyController(policy, options, cast("ElasticController | None", controller))
    server = _serve(listener, secret, standby, rendezvous.silence_s) if listener is not None else None
    try:
        connection = _connect(job, secret, print_line, server.address if server is not None else address)
        own = rendezvous.local_address or str(connection.getsockname()[0]).partition("%")[0]
        if server is None:
            server = _serve(_listen(own, address[1], secret), secret, standby, rendezvous.silence_s)
    except BaseException:
        if server is not None:
            server.close(0.0)
        raise
    follower = CoordinatorClient(connection, secret, job, standby)
    if listener is None:
        follower.announce_at(address)
    return NodeConnection(follower, own, server, serves=controller is not None, coordinates=lambda: standby.coordinates)


def _connect(job: Job, secret: bytes | None, print_line: Callable[[str], None], address: tuple[str, int]) -> Connection:
    """Connects to the coordinator of the running job, if there is one, and otherwise to the rendezvous.

    Raises a JobMovedError if the coordinator has changed or the job has ended.
    """
    rendezvous = job.rendezvous
    if rendezvous.running is None:
        return connect_in_time(address, secret, rendezvous.join_timeout_s, print_line)
    try:
        return connect_to_launcher(rendezvous.running[1], secret, _REACH_S)
    except LauncherUnreachableError as error:
        raise JobMovedError(str(error)) from error


def _serve(
    listener: ListeningEndpoint, secret: bytes | None, standby: StandbyController, silence_s: float
) -> RendezvousServer:
    controller = DashboardRelay(DiagnosisCollector(standby, "slot"))
    server = RendezvousServer(listener, secret, controller, silence_s, on_foreign_job=standby.warn_of_foreign_job)
    standby.wake = server.wake
    return server


def _listen(host: str, port: int, secret: bytes | None) -> ListeningEndpoint:
    try:
        return listen(host, port, secret)
    except PortInUseError:
        return listen(host, 0, secret)
