"""The protocol of an elastic job: messages between workers and launchers, replicated job state, and orders.

A *view* is a numbered list of the workers that train together; its number is called a generation. A *forced* view
follows the loss of a worker, and the survivors enter it immediately. A *planned* view adds or removes workers. The
members first form the view's process group, and enter the view together at the beginning of the next batch.

A worker that joins while others train is a *receiver* until it has caught up with them. Some members, the *senders*,
take a snapshot of the state for the receiver at the beginning of a batch. Such a *transfer* takes its number from the
same sequence as the views (`state_transfer/`).

A worker and its launcher exchange JSON objects, one per datagram, over a socket pair. Between launchers, the same
structs are sent inside the frames of `operate/launch/multinode/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted

LARGEST_DATAGRAM = 1 << 16  # maximum size of a datagram in bytes
LEFT_OUT, OUTVOTED = 75, 76  # exit codes after exclusion from a view, and after a wrong result or state
_NUMBERS = 1 << 16  # maximum number of machines in a job
_MOST_TRANSFERS = 16  # maximum number of transfers in the replicated state


class _WorkerMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message from or to a worker."""


class WorkerReady(_WorkerMessage, frozen=True):
    """The worker has built its model and requests to join. It has no state that others could copy."""

    fingerprint: str  # identical on all workers whose results are bitwise equal
    can_catch_up: bool = (
        False  # whether it can catch up during training; if not, the members pause while it gets the state
    )
    after: int = 0  # the last transfer offered to the worker; this transfer and all earlier ones have failed


class TransferReady(_WorkerMessage, frozen=True):
    """The sender serves the state before round `round` and later results at `address` ("" if the sender refuses)."""

    transfer: int
    round: int
    address: str


class CaughtUp(_WorkerMessage, frozen=True):
    """The worker has caught up with the members; its next round is `round`."""

    round: int


class ViewInstalled(_WorkerMessage, frozen=True):
    """The worker has entered view `generation` and holds the state before round `round`."""

    generation: int
    round: int


class ViewFailed(_WorkerMessage, frozen=True):
    """The connections of view `generation` have failed, and the worker is waiting for the next view."""

    generation: int
    round: int
    reason: str


class LeaveNotice(_WorkerMessage, frozen=True):
    """The worker was asked to exit and leaves after the current batch."""

    reason: str


class LoopFinished(_WorkerMessage, frozen=True):
    """The worker's training loop has completed, and the worker no longer needs the other members."""

    round: int


class View(_WorkerMessage, frozen=True):
    """The workers that currently train together."""

    generation: int  # larger than that of any earlier view
    members: tuple[str, ...]  # the workers' names, by rank
    is_planned: bool  # whether the members enter the view at the beginning of a batch rather than immediately
    must_wait: bool = False  # whether the members are too few, and must not begin another batch after the current one
    store: str = ""  # the store for the members' rendezvous, as in PACELINE_STORE, or "" for the previous store
    previous: int = 0  # the generation of the latest view that the coordinator had issued or taken over, or 0


class StateTransfer(_WorkerMessage, frozen=True):
    """The members in `senders` serve a snapshot to `receiver`.

    The senders take the snapshot at the first batch boundary after every member has received this message.
    """

    number: int  # larger than the generation of any earlier view
    receiver: str
    senders: tuple[str, ...]


class TransferOffer(_WorkerMessage, frozen=True):
    """The sender `sender` serves the state before round `round` and all later results at `address`."""

    transfer: int
    sender: str
    round: int
    address: str


class WaitNotice(_WorkerMessage, frozen=True):
    """The worker must wait, for a reason that is shown to the user."""

    reason: str


class ExitRequest(_WorkerMessage, frozen=True):
    """The worker must exit with `code`, for a reason that is shown to the user."""

    reason: str
    code: int = 0


FromWorker = WorkerReady | TransferReady | CaughtUp | ViewInstalled | ViewFailed | LeaveNotice | LoopFinished
ToWorker = View | StateTransfer | TransferOffer | WaitNotice | ExitRequest

_from_worker = msgspec.json.Decoder(FromWorker)
_to_worker = msgspec.json.Decoder(ToWorker)


def encode_message(message: FromWorker | ToWorker) -> bytes:
    """Encodes a message as one datagram."""
    return msgspec.json.encode(message)


def decode_from_worker(datagram: bytes) -> FromWorker:
    """Decodes a worker's message; raises ValueError if the datagram is not one."""
    message: FromWorker = decode_untrusted(_from_worker.decode, datagram)
    return message


def decode_to_worker(datagram: bytes) -> ToWorker:
    """Decodes a launcher's message; raises ValueError if the datagram is not one."""
    message: ToWorker = decode_untrusted(_to_worker.decode, datagram)
    return message


class LauncherAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A machine, and the address at which other launchers reach its launcher."""

    number: int
    host: str
    address: str


class ReplicatedJobState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The job state that every launcher stores, so that any launcher can take over as coordinator.

    All recorded facts remain true, so the copies of several launchers can be merged. A launcher that has recorded a
    worker's death also has all views that the worker received.
    """

    term: int = 0  # the largest known term of a coordinator
    coordinator: int = -1  # the machine number of the coordinator with this term
    fingerprint: str = ""
    complete: int = 0  # the generation of the last view that all its members are known to have entered, or 0
    views: tuple[View, ...] = ()  # the last complete view and all later ones
    dead: tuple[str, ...] = ()  # the members of `views` whose death was confirmed
    ended: tuple[int, ...] = ()  # the numbers of the machines whose launchers and workers have exited
    peers: tuple[LauncherAddress, ...] = ()
    transfers: tuple[StateTransfer, ...] = ()  # the last transfer to each receiver that may not have caught up yet
    job: str = ""  # distinguishes this job from all others

    def is_dead(self, uid: str) -> bool:
        """Returns True if a worker's death was confirmed."""
        return uid in self.dead or machine_of(uid) in self.ended

    @property
    def members(self) -> list[str]:
        """The members of all the views, sorted by name."""
        return sorted({uid for view in self.views for uid in view.members})

    def allows(self, reached: Iterable[str]) -> bool:
        """Returns True if the machines that run the workers in `reached` may continue without the other machines."""
        reachable = set(reached)
        dead = [uid for uid in self.members if self.is_dead(uid)]
        return all(has_quorum(view.members, dead, reachable) for view in self.views)


class WorkerReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A running worker, and the messages from this worker that are still relevant."""

    uid: str
    messages: tuple[FromWorker, ...] = ()
    stalled: str | None = None  # the reason why the launcher considers the worker stalled


class MachineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A launcher's report to the coordinator that it has begun to follow."""

    number: int
    host: str
    slots: int  # the number of workers that the launcher keeps running
    first_slot: int  # the number of the launcher's first slot in the job
    job_state: ReplicatedJobState
    workers: tuple[WorkerReport, ...] = ()
    ended: tuple[tuple[str, str, int], ...] = ()  # for each exited worker: its name, the cause, and its exit code
    finished: tuple[str, ...] = ()  # the names of the workers that have completed their training loop
    is_leaving: bool = False  # whether the launcher will exit as soon as its workers have exited


def has_quorum(members: Collection[str], dead: Collection[str], reachable: Collection[str]) -> bool:
    """Returns True if the partition with the workers in `reachable` may replace a view that consists of `members`.

    Only deaths confirmed by the worker's own machine reduce the number of members. A partition needs more than half of
    the remaining members. If it has exactly half, it may continue only if it contains the worker with the lowest name.
    A view whose members are all dead needs no quorum.
    """
    left = set(members) - set(dead)
    if not left:
        return True
    reached = left & set(reachable)
    return 2 * len(reached) > len(left) or (2 * len(reached) == len(left) and min(left) in reached)


def machine_of(uid: str) -> int:
    """Returns a worker's machine number."""
    return int(uid.partition(".")[0])


def next_term(term: int, number: int) -> int:
    """Returns the term after `term` for a coordinator on machine `number`; different machines get different terms."""
    return ((term // _NUMBERS + 1) * _NUMBERS) + number % _NUMBERS


def merge_job_states(parts: Iterable[ReplicatedJobState]) -> ReplicatedJobState:
    """Merges the job states of several launchers.

    Only the last complete view and the views that follow it, directly or indirectly, are kept. Another view with a
    larger generation comes from a coordinator that could not reach enough members, and can no longer be entered.
    """
    known = sorted(parts, key=lambda state: (state.term, state.coordinator))
    if not known:
        return ReplicatedJobState()
    complete = max(state.complete for state in known)
    views = {view.generation: view for state in known for view in state.views if view.generation >= complete}
    kept: list[View] = []
    for generation in sorted(views):
        if complete in (0, generation) or views[generation].previous in (complete, *(view.generation for view in kept)):
            kept.append(views[generation])
    members = {uid for view in kept for uid in view.members}
    return ReplicatedJobState(
        term=known[-1].term,
        coordinator=known[-1].coordinator,
        fingerprint=next((state.fingerprint for state in reversed(known) if state.fingerprint), ""),
        complete=complete,
        views=tuple(kept),
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
    """Returns the latest transfer to each receiver that is not a member. Transfers to members have completed."""
    latest = {transfer.receiver: transfer for transfer in sorted(transfers, key=lambda transfer: transfer.number)}
    kept = [transfer for transfer in latest.values() if transfer.receiver not in members]
    return tuple(sorted(kept, key=lambda transfer: transfer.number)[-_MOST_TRANSFERS:])


class _Order(msgspec.Struct, frozen=True, tag_field="kind", tag=True, forbid_unknown_fields=True):
    """An order from the coordinator to the machine named in `machine`, or to all machines if there is no such field."""


class SendOrder(_Order, frozen=True):
    """Forward a message to a worker. Messages to the same worker must arrive in the order in which they were issued."""

    machine: str
    uid: str
    message: ToWorker


class ReplicateOrder(_Order, frozen=True):
    """Store the job state and confirm its receipt. The launcher needs the state if it becomes the coordinator.

    Each machine must receive this order before any later order.
    """

    machine: str
    job_state: ReplicatedJobState


class StartOrder(_Order, frozen=True):
    """Start the machine's workers, and replace those that die."""

    machine: str


class HandoverOrder(_Order, frozen=True):
    """Follow machine `to`. That machine stands as a candidate, and the current coordinator exits."""

    machine: str
    to: int


class FenceStalledOrder(_Order, frozen=True):
    """Kill a stopped worker. The other members continue without it, so it must not resume training with them."""

    machine: str
    uid: str


class CloseSlotsOrder(_Order, frozen=True):
    """Stop replacing workers that exit. Running workers continue."""

    machine: str
    reason: str


class EndOrder(_Order, frozen=True):
    """End the job on all machines. Each launcher terminates its workers and exits with `code`."""

    code: int
    reason: str = ""


class NotifyOrder(_Order, frozen=True):
    """Print a sentence for the user. The coordinator issues this order once per event and does not repeat it."""

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
