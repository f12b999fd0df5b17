"""Writes the error of a call that has timed out: who did not come, who merely waits, and who holds them all up."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.channel import Outcome
from paceline.engine.naming import by_what, describe_call, names
from paceline.errors import CollectiveTimeoutError


def timed_out(
    outcome: Outcome, members: Sequence[object], group_rank: int, call: str, lost: str, everybody: Sequence[object]
) -> CollectiveTimeoutError:
    """Returns the error for a time-out; see `failures.to_error`."""
    me = members[group_rank]
    reporter = me if outcome.reporter < 0 else members[outcome.reporter]
    where = "" if reporter is me else f" on {reporter}"
    outside = [everybody[name] for name in outcome.held_by if 0 <= name < len(everybody)]
    to_blame = [members[at] for at in outcome.missing if at not in outcome.waiting] + outside
    seen = _came(outcome, members, me, outside) if outcome.came else _absence(outcome, members, group_rank, to_blame)
    return CollectiveTimeoutError(
        f"{me}: {call} timed out after {outcome.waited_ns / 1e9:.1f} s{where}{seen}. "
        f"{_advice(outcome, to_blame, me)}. {lost}"
    )


def _came(outcome: Outcome, members: Sequence[object], me: object, outside: Sequence[object]) -> str:
    """Says who holds the call up although all ranks have begun it."""
    others = [members[at] for at in outcome.missing if members[at] is not me]
    mine = ", which had waited for this rank's part in vain" if len(others) < len(outcome.missing) else ""
    theirs = f"; {names(others)} came to the call but did not complete it" if others else ""
    beyond = f"; what holds it up is {names(outside)}" if outside else ""
    return mine + theirs + beyond


def _absence(outcome: Outcome, members: Sequence[object], group_rank: int, to_blame: Sequence[object]) -> str:
    if not outcome.missing:
        return "; the engine cannot tell who did not come"
    me = members[group_rank]
    vain = ", which had waited for this rank in vain" if group_rank in outcome.missing else ""
    absent = [members[at] for at in outcome.missing if at not in outcome.waiting and at != group_rank]
    waiting = [members[at] for at in outcome.waiting if at != group_rank]
    parts = [f"; {names(absent)} did not come"] if absent else []
    why = f"in another call{_held_up_by(to_blame, me)}"
    if waiting:
        parts.append(f"; {names(waiting)} did not come because {'they wait' if waiting[1:] else 'it waits'} {why}")
    if group_rank in outcome.waiting:
        parts.append(f"; this rank waited {why}")
    known = [at for at in outcome.missing if at < len(outcome.calls) and at != group_rank]
    calls = by_what({at: f"latest {describe_call(outcome.calls[at])}" for at in known}, members, "{}: {}")
    return vain + "".join(parts) + (f" ({calls})" if calls else "")


def _held_up_by(to_blame: Sequence[object], me: object) -> str:
    """Says who holds up the call that another rank waits in, whether it waits for that one itself or through others."""
    if not to_blame:
        return " for ranks that wait as well"
    others = [member for member in to_blame if member != me]
    if not others:
        return ", which this rank holds up"
    mine = "" if len(others) == len(to_blame) else " and this rank"
    return f", which {names(others)}{mine} {'hold' if to_blame[1:] else 'holds'} up"


def _advice(outcome: Outcome, to_blame: Sequence[object], me: object) -> str:
    if outcome.came:
        return (
            "Either the call needs more time than the timeout allows (raise timeout=) or the process has been stopped "
            "or has no processor time (look at its state, with ps or top)"
        )
    others = [member for member in to_blame if member != me]
    if outcome.waiting and others:
        return (
            f"Look at {names(others)} first: it took another way through the program (look where it waits), it needs "
            "more time than the timeout allows (raise timeout=), or its process has been stopped"
        )
    if outcome.waiting and not to_blame:
        return (
            "The ranks wait for each other: all of them must make the calls and messages of all their groups in an "
            "order in which each one can end"
        )
    return (
        "Either it needs more time than the timeout allows (raise timeout=) or it took another way through the "
        "program (look where it waits)"
    )
