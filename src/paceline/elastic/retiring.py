"""How a coordinator whose launcher is about to end passes its office on, before anybody has to miss it.

1. The workers of its own machine leave by a planned view. The members of this view and of all that follow meet in the
   store of the successor's launcher. If no worker has to leave, a planned view of the same members does only that.
2. When all have entered it, every machine is told what a coordinator has to know, and the successor is told that it is
   its turn. From then on this coordinator decides nothing any more.
3. The successor stands, as after a loss (`election.py`), and leaves this launcher. Then the others are told to follow.

The successor is the machine that would be elected anyhow: the one with the lowest number. It needs the same quorum as
any candidate, so nothing depends on whether this goes well. Whoever is lost meanwhile, the others look on as always.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.elastic.job import Job
from paceline.elastic.orders import HandOver, Orders
from paceline.elastic.roster import Machine

_STANDS_S = 1.0  # how long the successor has to stand, before the others are told in any case
_UNFIT_S = 10.0  # how long a machine is passed over whose store some members have not reached
_SETTLES_S = 5.0  # how long the members have to come to rest, once the last worker here has ended


@dataclass
class Retirement:
    """The end of a coordinator's office.

    Attributes:
        home: the coordinator's machine.
        store: where the members of its views have met.
        successor: who is to coordinate next, if there is anybody.
        unfit_s: until when machines are passed over.
        empty_s: since when no worker runs on the coordinator's machine.
        told_s: when the successor was told.
        is_over: the others were told too.
    """

    home: Machine
    store: str
    successor: Machine | None = None
    unfit_s: dict[Machine, float] = field(default_factory=dict)
    empty_s: float | None = None
    told_s: float | None = None
    is_over: bool = False

    @property
    def has_resigned(self) -> bool:
        """Whether the coordinator decides nothing any more."""
        return self.told_s is not None


def choose(job: Job, retirement: Retirement, now_s: float) -> None:
    """Chooses the successor, at whose machine the members of views to come meet.

    A broken network may keep some of them from its store, though all reach this coordinator.
    """
    views, before, unfit_s = job.views, retirement.successor, retirement.unfit_s
    if before is not None and job.breaks.waiting and views.is_on_its_way_to(before.store):
        unfit_s[before] = now_s + _UNFIT_S
    able = [each for each in job.roster.machines.values() if each is not retirement.home and _may_succeed(each)]
    fit = [each for each in able if now_s >= unfit_s.get(each, now_s)]
    if able and not fit:
        job.due_s.append(min(unfit_s[each] for each in able))
    retirement.successor = min(fit, key=lambda each: (not each.slots, int(each.name)), default=None)
    job.views.store = retirement.store if retirement.successor is None else retirement.successor.store
    job.must_move = retirement.successor is not None and not _has_workers(job, retirement.home)


def may_hand_over(job: Job, retirement: Retirement, now_s: float) -> bool:
    """Returns whether the time has come to tell the successor."""
    stays = any(each.trains and each.leaving is None for each in job.views.team)
    is_needed = job.over is None and job.ending_s is None and stays
    if not is_needed or retirement.successor is None or _has_workers(job, retirement.home):
        retirement.empty_s = None
        return False
    if _has_settled(job):
        return True
    if retirement.empty_s is None:
        retirement.empty_s = now_s
    until_s = retirement.empty_s + _SETTLES_S
    if now_s < until_s:
        job.due_s.append(until_s)
        return False
    return not job.lacks_quorum


def tell_successor(job: Job, retirement: Retirement, now_s: float) -> None:
    """Tells the successor; this machine counts as one that has ended from now on."""
    successor, home = retirement.successor, retirement.home
    assert successor is not None
    home.has_left = home.has_said_so = True
    retirement.told_s = now_s
    job.orders.append(HandOver(successor.name, int(successor.name)))


def tell_others(job: Job, retirement: Retirement, now_s: float) -> Orders | None:
    """Returns the orders that end the office, when the successor stands; None if that is still to be waited for."""
    successor = retirement.successor
    assert successor is not None
    stands = not successor.is_reachable or successor.has_left  # it has left this launcher for itself, or was lost
    if retirement.is_over or not (stands or now_s >= deadline_s(retirement)):
        return None
    retirement.is_over = True
    told = [each for each in job.roster.machines.values() if each.is_reachable and each is not retirement.home]
    return [HandOver(each.name, int(successor.name)) for each in [*told, retirement.home]]


def deadline_s(retirement: Retirement) -> float:
    """Returns when the others are told in any case."""
    assert retirement.told_s is not None
    return retirement.told_s + _STANDS_S


def _may_succeed(machine: Machine) -> bool:
    return machine.is_reachable and machine.has_begun and not machine.is_leaving and bool(machine.store)


def _has_workers(job: Job, machine: Machine) -> bool:
    return any(each.lives and each.machine is machine for each in job.roster.workers.values())


def _has_settled(job: Job) -> bool:
    """Whether another coordinator would have nothing to do at once."""
    views = job.views
    is_told = views.is_complete and job.withheld is None and not job.breaks.waiting
    return is_told and views.latest is not None and views.latest.store == views.store
