"""Simulates programs of several ranks with one fault in virtual time, and returns what a launcher would observe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    ExitReason,
    GroupMembership,
    JobSnapshot,
    ProcessActivity,
    ProcessState,
    RankCall,
    RankExitStatus,
    RankState,
    StackLocation,
)

WORLD = "default#1"
LATE_S = 20.0  # time from the last event to the observation
CALLING = StackLocation("distributed.all_reduce", "train.py:88", is_call=True)
IDLE = ProcessActivity(ProcessState.SLEEPS)


@dataclass(frozen=True)
class Planned:
    """A call that a rank will run."""

    header: CallSignature
    group: str = WORLD
    step: int | None = None


@dataclass
class _Player:
    plan: list[Planned]
    stops_at: int | None = None  # the rank never runs the call with this index
    calls: list[RankCall] = field(default_factory=list)
    done: int = 0
    is_in: bool = False
    failed: bool = False

    @property
    def next(self) -> Planned | None:
        is_over = self.done >= len(self.plan) or self.done == self.stops_at or self.failed
        return None if is_over else self.plan[self.done]


def play(
    plans: Sequence[Sequence[Planned]],
    groups: Mapping[str, Sequence[int]] | None = None,
    stopped: tuple[int, int] | None = None,
    like: RankState | None = None,
) -> JobSnapshot:
    """Returns the observed state after all ranks have advanced as far as possible.

    Args:
        plans: The calls of each rank, in order.
        groups: The members of the groups, except the group of all ranks.
        stopped: A rank, and the index of the call that it never runs.
        like: The observed state of the stopped rank, except its calls.
    """
    members = {WORLD: list(range(len(plans))), **(groups or {})}
    players = [_Player(list(plan)) for plan in plans]
    if stopped is not None:
        players[stopped[0]].stops_at = stopped[1]
    now_s = 0.0
    while _advance(players, members, now_s):
        now_s += 0.01
    ranks = []
    for number, player in enumerate(players):
        seats = {name: GroupMembership(own.index(number), len(own)) for name, own in members.items() if number in own}
        last_s = max((call.ended_s for call in player.calls if call.ended_s is not None), default=0.0)
        rank = RankState(number, "host", 100 + number, seats, tuple(player.calls), _step(player), last_s, CALLING, IDLE)
        if player.failed:
            rank = replace(
                rank, ending=RankExitStatus(ExitReason.MISMATCH, now_s, "CollectiveMismatchError", "train.py:88")
            )
        elif stopped is not None and number == stopped[0] and like is not None:
            rank = replace(rank, place=like.place, process=like.process, ending=like.ending)
        elif player.done == len(player.plan):
            rank = replace(rank, place=None, process=None, ending=RankExitStatus(ExitReason.FINISHED, now_s))
        ranks.append(rank)
    return JobSnapshot(now_s + LATE_S, tuple(ranks))


def _step(player: _Player) -> int | None:
    return player.calls[-1].step if player.calls else None


def _advance(players: Sequence[_Player], members: Mapping[str, Sequence[int]], now_s: float) -> bool:
    """Advances every rank to its next call, and completes calls that can complete; returns True if anything changed."""
    has_moved = False
    for player in players:
        if (planned := player.next) is not None and not player.is_in:
            sequence = 1 + sum(1 for call in player.calls if call.group == planned.group)
            player.calls.append(RankCall(planned.group, sequence, planned.header, now_s, step=planned.step))
            player.is_in = has_moved = True
    for group, ranks in members.items():
        own = [players[rank] for rank in ranks]
        if not all(player.is_in and player.next is not None and player.next.group == group for player in own):
            continue
        fits = len({player.calls[-1].header for player in own}) == 1
        for player in own:
            outcome = "ok" if fits else "mismatch"
            player.calls[-1] = replace(player.calls[-1], ended_s=now_s, outcome=outcome)
            player.is_in, player.failed = False, not fits
            player.done += fits
        has_moved = True
    return has_moved


def loop(step: Sequence[CallSignature], steps: int, marks: bool = True) -> list[Planned]:
    """Returns the calls of a training loop; `marks` is True if it records its steps."""
    return [Planned(header, step=number + 1 if marks else None) for number in range(steps) for header in step]
