"""What the coordinator of an elastic job wants done: messages for workers, orders to machines, text for the user."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.elastic.knowledge import Knowledge
from paceline.elastic.messages import ToWorker


@dataclass(frozen=True)
class Tell:
    """Pass a message on to a worker. Messages to one worker must arrive in the order in which they were given."""

    machine: str
    uid: str
    message: ToWorker


@dataclass(frozen=True)
class Know:
    """The machine's launcher keeps this, in case that it has to coordinate the job, and answers that it does.

    It must arrive before everything that is ordered after it, on every machine.
    """

    machine: str
    knowledge: Knowledge


@dataclass(frozen=True)
class Begin:
    """The machine starts its workers, and replaces those that die."""

    machine: str


@dataclass(frozen=True)
class HandOver:
    """The machine's launcher follows machine `to` from now on. That one stands; the one that gives this order ends."""

    machine: str
    to: int


@dataclass(frozen=True)
class Fence:
    """The machine's launcher kills a worker that is stopped: others go on without it, and it must not wake up then."""

    machine: str
    uid: str


@dataclass(frozen=True)
class StopReplacing:
    """The machine replaces no worker from now on; those that run go on."""

    machine: str
    reason: str


@dataclass(frozen=True)
class End:
    """The job is over, on all machines: workers that still run are ended, and the launchers end with `code`."""

    code: int
    reason: str = ""


@dataclass(frozen=True)
class Say:
    """A sentence for the user's terminal. It is given once for each change, however long the change lasts."""

    text: str


Order = Tell | Know | Begin | HandOver | Fence | StopReplacing | End | Say
Orders = list[Order]
