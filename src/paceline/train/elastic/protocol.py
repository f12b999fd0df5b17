"""What an elastic worker and its launcher tell each other: one JSON object in each datagram of a socket pair.

A *view* is a numbered list of the workers that train together; its number is called a generation. A new view is
*forced* after a worker was lost, and the survivors enter it at once; or it is *planned* because workers come or leave,
and its members enter it together at the beginning of the next batch after all of them have formed its process group.

A worker that comes while others train is a *receiver* until it has caught up with them: *senders* among the members take
a snapshot of the state at the beginning of a batch, for a *transfer* that is numbered like the views. `joining/` has the
rest.

Which of two parts of a job that do not see each other may go on.

What every launcher knows of an elastic job, so that any of them can coordinate it when the one that does is lost.

What the coordinator of an elastic job wants done: messages for workers, orders to machines, text for the user.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted


def has_quorum(members: Collection[str], dead: Collection[str], reachable: Collection[str]) -> bool:
    """Returns whether the part that reaches `reachable` may install a view after the one of `members`.

    Only deaths that were confirmed, by the machine on which the worker ran, make a view smaller. A part needs more than
    half of those left; of two halves, the one with the member whose name is the lowest goes on. A view all of whose
    members are dead has nobody left who could disagree.
    """
    left = set(members) - set(dead)
    if not left:
        return True
    here = left & set(reachable)
    return 2 * len(here) > len(left) or (2 * len(here) == len(left) and min(left) in here)


LARGEST_DATAGRAM = 1 << 16  # bytes of a datagram
LEFT_OUT, OUTVOTED = 75, 76  # exit codes of workers that a view left out, or whose result or state was wrong


class _WorkerMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message."""


class Ready(_WorkerMessage, frozen=True):
    """The worker has built its model and asks to take part. It has no state that anybody may copy.

    Attributes:
        fingerprint: a text that is equal in all workers whose results have the same bits.
        learns: it can catch up with the others while they train; otherwise they wait for it while it gets the state.
        after: the last transfer that it was offered, which has come to nothing, as have those before.
    """

    fingerprint: str
    learns: bool = False
    after: int = 0


class TransferReady(_WorkerMessage, frozen=True):
    """The worker serves the state that precedes the round `round`, and the results since; "" if it cannot."""

    transfer: int
    round: int
    address: str


class CaughtUp(_WorkerMessage, frozen=True):
    """The worker has caught up with the others: its next round is `round`."""

    round: int


class Installed(_WorkerMessage, frozen=True):
    """The worker has entered the view `generation` and holds the state that precedes the round `round`."""

    generation: int
    round: int


class Broken(_WorkerMessage, frozen=True):
    """The connections of the view `generation` have failed; the worker waits for the next view."""

    generation: int
    round: int
    reason: str


class Leaving(_WorkerMessage, frozen=True):
    """The worker was asked to end, and leaves at the end of the batch that it is in."""

    reason: str


class LoopFinished(_WorkerMessage, frozen=True):
    """The worker's loop is over; it needs nobody any more."""

    round: int


class View(_WorkerMessage, frozen=True):
    """These workers train together from now on.

    Attributes:
        generation: the number of the view, larger than that of any view before.
        members: the workers' names, by rank.
        is_planned: the members enter it at the beginning of a batch, otherwise at once.
        must_wait: fewer workers are here than the job needs: finish the batch in progress, and begin no other in this
            view.
        store: where the members meet, as in PACELINE_STORE; empty for the store in which they met before.
    """

    generation: int
    members: tuple[str, ...]
    is_planned: bool
    must_wait: bool = False
    store: str = ""


class StateTransfer(_WorkerMessage, frozen=True):
    """The senders serve their state to the receiver, from the next batch on that begins after all members have heard it.

    `number` is larger than the generation of any view before.
    """

    number: int
    receiver: str
    senders: tuple[str, ...]


class TransferOffer(_WorkerMessage, frozen=True):
    """A sender serves the receiver at an address, from the state that precedes the round `round` on."""

    transfer: int
    sender: str
    round: int
    address: str


class WaitNotice(_WorkerMessage, frozen=True):
    """Nothing can be done yet; the reason is for the user."""

    reason: str


class Dismissed(_WorkerMessage, frozen=True):
    """The worker takes no part any more, and ends with `code`; the reason is for the user."""

    reason: str
    code: int = 0


FromWorker = Ready | TransferReady | CaughtUp | Installed | Broken | Leaving | LoopFinished
ToWorker = View | StateTransfer | TransferOffer | WaitNotice | Dismissed

_from_worker = msgspec.json.Decoder(FromWorker)
_to_worker = msgspec.json.Decoder(ToWorker)


def encode_message(message: FromWorker | ToWorker) -> bytes:
    """Returns the message as one datagram."""
    return msgspec.json.encode(message)


def decode_from_worker(datagram: bytes) -> FromWorker:
    """Returns a worker's message.

    Raises:
        ValueError: the datagram is none.
    """
    message: FromWorker = decode_untrusted(_from_worker.decode, datagram)
    return message


def decode_to_worker(datagram: bytes) -> ToWorker:
    """Returns a launcher's message.

    Raises:
        ValueError: the datagram is none.
    """
    message: ToWorker = decode_untrusted(_to_worker.decode, datagram)
    return message


_NUMBERS = 1 << 16  # of machines in a job
_MOST_TRANSFERS = 16  # that are remembered


class LauncherAddress(msgspec.Struct, frozen=True, array_like=True):
    """A machine, and where its launcher can be reached by the others."""

    number: int
    host: str
    address: str


class ReplicatedJobState(msgspec.Struct, frozen=True):
    """Facts about a job. They never become false, so those of several launchers can be put together.

    Whoever knows that a worker is dead knows all views that this worker's launcher ever passed on to it.

    Attributes:
        term: the largest of a coordinator that was heard of.
        coordinator: the number of the machine with that coordinator.
        fingerprint: of the job's members.
        complete: the number of the last view that all its members are known to have entered, 0 without one.
        views: that view, and all that were given after it.
        dead: workers in them whose end was confirmed.
        ended: machines whose launchers have ended, and their workers with them.
        peers: the machines.
        transfers: the last one of each receiver that may not have caught up with the others.
        job: tells the job from all others.
    """

    term: int = 0
    coordinator: int = -1
    fingerprint: str = ""
    complete: int = 0
    views: tuple[View, ...] = ()
    dead: tuple[str, ...] = ()
    ended: tuple[int, ...] = ()
    peers: tuple[LauncherAddress, ...] = ()
    transfers: tuple[StateTransfer, ...] = ()
    job: str = ""

    def is_dead(self, uid: str) -> bool:
        """Returns whether a worker's end was confirmed."""
        return uid in self.dead or machine_of(uid) in self.ended

    @property
    def members(self) -> list[str]:
        """The members of all the views, in order of their names."""
        return sorted({uid for view in self.views for uid in view.members})

    def allows(self, reached: Iterable[str]) -> bool:
        """Returns whether whoever reaches these living workers may go on without the others."""
        here = set(reached)
        dead = [uid for uid in self.members if self.is_dead(uid)]
        return all(has_quorum(view.members, dead, here) for view in self.views)


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """A worker that runs: what it said that still matters, and why its launcher thinks that it does nothing."""

    uid: str
    said: tuple[FromWorker, ...] = ()
    stalled: str | None = None


class MachineReport(msgspec.Struct, frozen=True):
    """What a launcher tells a coordinator that it follows from now on.

    Attributes:
        number: of its machine.
        host: its name.
        slots: how many workers it keeps running.
        first_slot: the number of the first of its slots in the job.
        knowledge: what it knows of the job.
        workers: those that run.
        ended: the names of those that have ended, how, and their exit codes.
        is_leaving: it ends as soon as its workers have.
    """

    number: int
    host: str
    slots: int
    first_slot: int
    knowledge: ReplicatedJobState
    workers: tuple[WorkerReport, ...] = ()
    ended: tuple[tuple[str, str, int], ...] = ()
    is_leaving: bool = False


def machine_of(uid: str) -> int:
    """Returns the number of a worker's machine."""
    return int(uid.partition(".")[0])


def merge_job_states(parts: Iterable[ReplicatedJobState]) -> ReplicatedJobState:
    """Returns all that is known to any of several launchers."""
    known = sorted(parts, key=lambda each: (each.term, each.coordinator))
    if not known:
        return ReplicatedJobState()
    complete = max(each.complete for each in known)
    views = {view.generation: view for each in known for view in each.views if view.generation >= complete}
    kept = tuple(views[generation] for generation in sorted(views))
    members = {uid for view in kept for uid in view.members}
    return ReplicatedJobState(
        term=known[-1].term,
        coordinator=known[-1].coordinator,
        fingerprint=next((each.fingerprint for each in reversed(known) if each.fingerprint), ""),
        complete=complete,
        views=kept,
        dead=tuple(sorted({uid for each in known for uid in each.dead if uid in members})),
        ended=tuple(sorted({number for each in known for number in each.ended})),
        peers=tuple({peer.number: peer for each in known for peer in each.peers}.values()),
        transfers=_open_transfers(
            (transfer for each in known for transfer in each.transfers),
            views[complete].members if complete in views else (),
        ),
        job=next((each.job for each in reversed(known) if each.job), ""),
    )


def _open_transfers(transfers: Iterable[StateTransfer], members: Iterable[str]) -> tuple[StateTransfer, ...]:
    """Returns the last transfer of each receiver, without those of the members, which are over."""
    latest = {each.receiver: each for each in sorted(transfers, key=lambda each: each.number)}
    kept = [each for each in latest.values() if each.receiver not in members]
    return tuple(sorted(kept, key=lambda each: each.number)[-_MOST_TRANSFERS:])


def next_term(term: int, number: int) -> int:
    """Returns the term of a coordinator on machine `number` that is to follow `term`; no two machines have the same."""
    return ((term // _NUMBERS + 1) * _NUMBERS) + number % _NUMBERS


@dataclass(frozen=True)
class SendOrder:
    """Pass a message on to a worker. Messages to one worker must arrive in the order in which they were given."""

    machine: str
    uid: str
    message: ToWorker


@dataclass(frozen=True)
class ReplicateOrder:
    """The machine's launcher keeps this, in case that it has to coordinate the job, and answers that it does.

    It must arrive before everything that is ordered after it, on every machine.
    """

    machine: str
    knowledge: ReplicatedJobState


@dataclass(frozen=True)
class StartOrder:
    """The machine starts its workers, and replaces those that die."""

    machine: str


@dataclass(frozen=True)
class HandoverOrder:
    """The machine's launcher follows machine `to` from now on. That one stands; the one that gives this order ends."""

    machine: str
    to: int


@dataclass(frozen=True)
class FenceStalledOrder:
    """The machine's launcher kills a worker that is stopped: others go on without it, and it must not wake up then."""

    machine: str
    uid: str


@dataclass(frozen=True)
class CloseSlotsOrder:
    """The machine replaces no worker from now on; those that run go on."""

    machine: str
    reason: str


@dataclass(frozen=True)
class EndOrder:
    """The job is over, on all machines: workers that still run are ended, and the launchers end with `code`."""

    code: int
    reason: str = ""


@dataclass(frozen=True)
class NotifyOrder:
    """A sentence for the user's terminal. It is given once for each change, however long the change lasts."""

    text: str


CoordinatorOrder = (
    SendOrder
    | ReplicateOrder
    | StartOrder
    | HandoverOrder
    | FenceStalledOrder
    | CloseSlotsOrder
    | EndOrder
    | NotifyOrder
)
CoordinatorOrders = list[CoordinatorOrder]
