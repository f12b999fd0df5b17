"""What an elastic worker and its launcher tell each other: one JSON object in each datagram of a socket pair.

A *view* is a numbered list of the workers that train together; its number is called a generation. A new view is
*forced* after a worker was lost, and the survivors enter it at once; or it is *planned* because workers come or leave,
and its members enter it together at the beginning of the next batch after all of them have formed its process group.

A worker that comes while others train is a *learner* until it has caught up with them: *donors* among the members take
a snapshot of the state at the beginning of a batch, for a *lesson* that is numbered like the views. `joining/` has the
rest.
"""

from __future__ import annotations

import msgspec

from paceline.security.received import decoded

LARGEST = 1 << 16  # bytes of a datagram
LEFT_OUT, OUTVOTED = 75, 76  # exit codes of workers that a view left out, or whose result or state was wrong


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message."""


class Ready(_Message, frozen=True):
    """The worker has built its model and asks to take part. It has no state that anybody may copy.

    Attributes:
        fingerprint: a text that is equal in all workers whose results have the same bits.
        learns: it can catch up with the others while they train; otherwise they wait for it while it gets the state.
        after: the last lesson that it was offered, which has come to nothing, as have those before.
    """

    fingerprint: str
    learns: bool = False
    after: int = 0


class Donating(_Message, frozen=True):
    """The worker serves the state that precedes the round `round`, and the results since; "" if it cannot."""

    lesson: int
    round: int
    address: str


class Learned(_Message, frozen=True):
    """The worker has caught up with the others: its next round is `round`."""

    round: int


class Installed(_Message, frozen=True):
    """The worker has entered the view `generation` and holds the state that precedes the round `round`."""

    generation: int
    round: int


class Broken(_Message, frozen=True):
    """The connections of the view `generation` have failed; the worker waits for the next view."""

    generation: int
    round: int
    reason: str


class Leaving(_Message, frozen=True):
    """The worker was asked to end, and leaves at the end of the batch that it is in."""

    reason: str


class Finished(_Message, frozen=True):
    """The worker's loop is over; it needs nobody any more."""

    round: int


class View(_Message, frozen=True):
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


class Lesson(_Message, frozen=True):
    """The donors serve their state to the learner, from the next batch on that begins after all members have heard it.

    `number` is larger than the generation of any view before.
    """

    number: int
    learner: str
    donors: tuple[str, ...]


class Learn(_Message, frozen=True):
    """A donor serves the learner at an address, from the state that precedes the round `round` on."""

    lesson: int
    donor: str
    round: int
    address: str


class Wait(_Message, frozen=True):
    """Nothing can be done yet; the reason is for the user."""

    reason: str


class Dismissed(_Message, frozen=True):
    """The worker takes no part any more, and ends with `code`; the reason is for the user."""

    reason: str
    code: int = 0


FromWorker = Ready | Donating | Learned | Installed | Broken | Leaving | Finished
ToWorker = View | Lesson | Learn | Wait | Dismissed

_from_worker = msgspec.json.Decoder(FromWorker)
_to_worker = msgspec.json.Decoder(ToWorker)


def encode(message: FromWorker | ToWorker) -> bytes:
    """Returns the message as one datagram."""
    return msgspec.json.encode(message)


def from_worker(datagram: bytes) -> FromWorker:
    """Returns a worker's message.

    Raises:
        ValueError: the datagram is none.
    """
    message: FromWorker = decoded(_from_worker.decode, datagram)
    return message


def to_worker(datagram: bytes) -> ToWorker:
    """Returns a launcher's message.

    Raises:
        ValueError: the datagram is none.
    """
    message: ToWorker = decoded(_to_worker.decode, datagram)
    return message
