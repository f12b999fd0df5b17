"""The protocol of an elastic job: messages between workers and launchers, replicated job state, and orders.

A *view* is a numbered list of the workers that train together; its number is called a generation. A *forced* view
follows the loss of a worker, and the survivors enter it immediately. A *planned* view adds or removes workers. Its
members first form its process group, and enter the view together at the beginning of the next batch.

A worker that joins while others train is a *receiver* until it has caught up with them: *senders* among the members
take a snapshot of the state at the beginning of a batch, for a *transfer* that is numbered like the views
(`state_transfer/`).

A worker and its launcher exchange one JSON object in each datagram of a socket pair. Between launchers the same structs
are sent inside the frames of `operate/launch/multinode/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted

LARGEST_DATAGRAM = 1 << 16  # bytes of a datagram
LEFT_OUT, OUTVOTED = 75, 76  # exit codes of workers that were left out of a view, or whose result or state was wrong
_NUMBERS = 1 << 16  # the largest number of machines in a job
_MOST_TRANSFERS = 16  # the number of transfers that are remembered


class _WorkerMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message from or to a worker."""


class Ready(_WorkerMessage, frozen=True):
    """The worker has built its model and requests to join. It has no state that others may copy.

    Attributes:
        fingerprint: A text that is equal in all workers whose results are bitwise equal.
        learns: Whether the worker can catch up while the others train; otherwise they wait while it receives the state.
        after: The last transfer that was offered to the worker; that transfer and all earlier ones have failed.
    """

    fingerprint: str
    learns: bool = False
    after: int = 0


class TransferReady(_WorkerMessage, frozen=True):
    """The worker serves the state before the round `round` and all later results; it cannot if `address` is ""."""

    transfer: int
    round: int
    address: str


class CaughtUp(_WorkerMessage, frozen=True):
    """The worker has caught up with the others: its next round is `round`."""

    round: int


class Installed(_WorkerMessage, frozen=True):
    """The worker has entered the view `generation` and holds the state before the round `round`."""

    generation: int
    round: int


class Broken(_WorkerMessage, frozen=True):
    """The connections of the view `generation` have failed; the worker waits for the next view."""

    generation: int
    round: int
    reason: str


class Leaving(_WorkerMessage, frozen=True):
    """The worker was asked to end, and leaves at the end of the current batch."""

    reason: str


class LoopFinished(_WorkerMessage, frozen=True):
    """The worker's loop has completed; the worker no longer needs the others."""

    round: int


class View(_WorkerMessage, frozen=True):
    """The workers that train together from now on.

    Attributes:
        generation: The number of the view, larger than that of any earlier view.
        members: The workers' names, by rank.
        is_planned: Whether the members enter the view at the beginning of a batch; otherwise they do so immediately.
        must_wait: Whether there are fewer workers than the job needs: they finish the batch in progress, and begin no
            other batch in this view.
        store: The store in which the members meet, as in PACELINE_STORE, or "" for the previous one.
    """

    generation: int
    members: tuple[str, ...]
    is_planned: bool
    must_wait: bool = False
    store: str = ""


class StateTransfer(_WorkerMessage, frozen=True):
    """The members in `senders` serve a snapshot to `receiver`.

    They take it at the first batch boundary after every member has received this message.

    Attributes:
        number: The number of the transfer, larger than the generation of any earlier view.
        receiver: The name of the receiver.
        senders: The names of the senders.
    """

    number: int
    receiver: str
    senders: tuple[str, ...]


class TransferOffer(_WorkerMessage, frozen=True):
    """The sender `sender` serves the receiver at `address`, from the state before the round `round`."""

    transfer: int
    sender: str
    round: int
    address: str


class WaitNotice(_WorkerMessage, frozen=True):
    """The worker has to wait; the reason is for the user."""

    reason: str


class Dismissed(_WorkerMessage, frozen=True):
    """The worker must end with `code`; the reason is for the user."""

    reason: str
    code: int = 0


FromWorker = Ready | TransferReady | CaughtUp | Installed | Broken | Leaving | LoopFinished
ToWorker = View | StateTransfer | TransferOffer | WaitNotice | Dismissed

_from_worker = msgspec.json.Decoder(FromWorker)
_to_worker = msgspec.json.Decoder(ToWorker)


def encode_message(message: FromWorker | ToWorker) -> bytes:
    """Encodes a message as one datagram."""
    return msgspec.json.encode(message)


def decode_from_worker(datagram: bytes) -> FromWorker:
    """Decodes a worker's message.

    Raises:
        ValueError: The datagram is not a message of a worker.
    """
    message: FromWorker = decode_untrusted(_from_worker.decode, datagram)
    return message


def decode_to_worker(datagram: bytes) -> ToWorker:
    """Decodes a launcher's message.

    Raises:
        ValueError: The datagram is not a message of a launcher.
    """
    message: ToWorker = decode_untrusted(_to_worker.decode, datagram)
    return message


class LauncherAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A machine, and the address at which other launchers reach its launcher."""

    number: int
    host: str
    address: str


class ReplicatedJobState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts about a job that every launcher holds, so that any of them can take over as coordinator.

    They never become false, so the facts of several launchers can be merged. A launcher that holds a worker's death
    also holds all views that the worker's launcher passed on to the worker.

    Attributes:
        term: The largest known term of a coordinator.
        coordinator: The number of that coordinator's machine.
        fingerprint: The fingerprint of the job's members.
        complete: The generation of the last view that all its members are known to have entered, or 0.
        views: That view, and all later ones.
        dead: The workers in these views whose end was confirmed.
        ended: The machines whose launchers have ended, along with their workers.
        peers: The machines.
        transfers: The last transfer of each receiver that may not have caught up.
        job: The identity of the job.
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
        """Returns whether the machines of these living workers may continue without the others."""
        reachable = set(reached)
        dead = [uid for uid in self.members if self.is_dead(uid)]
        return all(has_quorum(view.members, dead, reachable) for view in self.views)


class WorkerReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A running worker: its messages that are still relevant, and why its launcher considers it stalled, if so."""

    uid: str
    messages: tuple[FromWorker, ...] = ()
    stalled: str | None = None


class MachineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The report of a launcher to the coordinator that it now follows.

    Attributes:
        number: The number of the launcher's machine.
        host: The machine's host name.
        slots: The number of workers that the launcher keeps running.
        first_slot: The number of the launcher's first slot in the job.
        knowledge: The job's state as the launcher holds it.
        workers: The running workers.
        ended: For each worker that has ended, its name, a description of the cause, and its exit code.
        is_leaving: Whether the launcher ends as soon as its workers have ended.
    """

    number: int
    host: str
    slots: int
    first_slot: int
    knowledge: ReplicatedJobState
    workers: tuple[WorkerReport, ...] = ()
    ended: tuple[tuple[str, str, int], ...] = ()
    is_leaving: bool = False


def has_quorum(members: Collection[str], dead: Collection[str], reachable: Collection[str]) -> bool:
    """Returns whether the partition that reaches `reachable` may install a view after that of `members`.

    Only deaths that the worker's own machine has confirmed make a view smaller. A partition needs more than half of the
    remaining members; of two halves, the one with the lowest worker name continues. A view whose members are all dead
    needs no quorum, since no member can disagree.
    """
    left = set(members) - set(dead)
    if not left:
        return True
    reached = left & set(reachable)
    return 2 * len(reached) > len(left) or (2 * len(reached) == len(left) and min(left) in reached)


def machine_of(uid: str) -> int:
    """Returns the number of a worker's machine."""
    return int(uid.partition(".")[0])


def next_term(term: int, number: int) -> int:
    """Returns the term that follows `term` for a coordinator on machine `number`; it differs between machines."""
    return ((term // _NUMBERS + 1) * _NUMBERS) + number % _NUMBERS


def merge_job_states(parts: Iterable[ReplicatedJobState]) -> ReplicatedJobState:
    """Merges the facts of several launchers."""
    known = sorted(parts, key=lambda state: (state.term, state.coordinator))
    if not known:
        return ReplicatedJobState()
    complete = max(state.complete for state in known)
    views = {view.generation: view for state in known for view in state.views if view.generation >= complete}
    kept = tuple(views[generation] for generation in sorted(views))
    members = {uid for view in kept for uid in view.members}
    return ReplicatedJobState(
        term=known[-1].term,
        coordinator=known[-1].coordinator,
        fingerprint=next((state.fingerprint for state in reversed(known) if state.fingerprint), ""),
        complete=complete,
        views=kept,
        dead=tuple(sorted({uid for state in known for uid in state.dead if uid in members})),
        ended=tuple(sorted({number for state in known for number in state.ended})),
        peers=tuple({peer.number: peer for state in known for peer in state.peers}.values()),
        transfers=_open_transfers(
            (transfer for state in known for transfer in state.transfers),
            views[complete].members if complete in views else (),
        ),
        job=next((state.job for state in reversed(known) if state.job), ""),
    )


def _open_transfers(transfers: Iterable[StateTransfer], members: Iterable[str]) -> tuple[StateTransfer, ...]:
    """Returns the last transfer of each receiver, except for members, whose transfers have completed."""
    latest = {transfer.receiver: transfer for transfer in sorted(transfers, key=lambda transfer: transfer.number)}
    kept = [transfer for transfer in latest.values() if transfer.receiver not in members]
    return tuple(sorted(kept, key=lambda transfer: transfer.number)[-_MOST_TRANSFERS:])


class _Order(msgspec.Struct, frozen=True, tag_field="kind", tag=True, forbid_unknown_fields=True):
    """An order of the coordinator. `machine`, if present, is the name of the addressee."""


class SendOrder(_Order, frozen=True):
    """Pass a message on to a worker. Messages to one worker must arrive in the order of their orders."""

    machine: str
    uid: str
    message: ToWorker


class ReplicateOrder(_Order, frozen=True):
    """Store the job's state, in case this machine's launcher has to coordinate the job, and confirm it.

    On every machine, this order must arrive before all later ones.
    """

    machine: str
    knowledge: ReplicatedJobState


class StartOrder(_Order, frozen=True):
    """Start the machine's workers, and replace those that die."""

    machine: str


class HandoverOrder(_Order, frozen=True):
    """Follow machine `to` from now on. That machine stands, and the coordinator that gives this order ends."""

    machine: str
    to: int


class FenceStalledOrder(_Order, frozen=True):
    """Kill a stopped worker: the others continue without it, and it must not resume afterwards."""

    machine: str
    uid: str


class CloseSlotsOrder(_Order, frozen=True):
    """Replace no worker from now on; those that run continue."""

    machine: str
    reason: str


class EndOrder(_Order, frozen=True):
    """End the job on all machines: running workers are ended, and the launchers end with `code`."""

    code: int
    reason: str = ""


class NotifyOrder(_Order, frozen=True):
    """Print a sentence for the user. The order is given once for each change, however long the change lasts."""

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
