"""Decides which workers of an elastic job train together in which view, without a socket, a process or a clock."""

from __future__ import annotations

from paceline.elastic.messages import FromWorker
from paceline.elastic.orders import Orders
from paceline.elastic.policy import Policy


class Coordinator:
    """The workers of an elastic job. `tick` must be called at `deadline_s` if nothing else happens before.

    Every method returns what is to be done now, in this order. Names of machines and workers are unique in the job for
    ever, and a worker that replaces another has a name of its own.
    """

    deadline_s: float | None

    def __init__(self, policy: Policy, now_s: float, term: int = 1) -> None:
        raise NotImplementedError

    def machine_joined(self, machine: str, host: str, slots: int, now_s: float) -> Orders:
        """Adds a machine that keeps `slots` workers running once it is told to Begin, or one that was unreachable.

        After a machine's return its launcher reports, for each of its workers that runs, that it started, and the
        messages of its Standing; workers of the machine that it does not name before it calls `machine_listed` are dead.
        """
        raise NotImplementedError

    def machine_listed(self, machine: str, now_s: float) -> Orders:
        """The machine that joined has named all of its workers that run (none, for one that is new)."""
        raise NotImplementedError

    def machine_lost(self, machine: str, why: str, now_s: float) -> Orders:
        """The machine cannot be reached. Its workers may live, and may be training with others."""
        raise NotImplementedError

    def machine_left(self, machine: str, why: str, now_s: float) -> Orders:
        """The machine's launcher has ended its workers, and goes."""
        raise NotImplementedError

    def slots_changed(self, machine: str, slots: int, now_s: float) -> Orders:
        """The machine keeps this many workers running from now on, for instance because one failed again and again."""
        raise NotImplementedError

    def worker_started(self, uid: str, machine: str, now_s: float) -> Orders:
        """A worker runs; of one that is known, that it still does."""
        raise NotImplementedError

    def worker_stalled(self, uid: str, why: str, now_s: float) -> Orders:
        """A worker does not answer its launcher (it is stopped, say). It is left out, and may come back by Ready."""
        raise NotImplementedError

    def worker_ended(self, uid: str, how: str, exit_code: int, now_s: float) -> Orders:
        """A worker has ended, and all that it sent has been reported before."""
        raise NotImplementedError

    def worker_said(self, uid: str, message: FromWorker, now_s: float) -> Orders:
        """Takes a worker's message; each worker's messages come in the order in which it sent them."""
        raise NotImplementedError

    def tick(self, now_s: float) -> Orders:
        """Does what is due at `now_s`."""
        raise NotImplementedError
