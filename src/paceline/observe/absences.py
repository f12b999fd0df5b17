"""Says what a rank does for which others wait: it has ended, is stopped, waits for data, works, or is stuck."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.observe.evidence import STILL, Manner, Place, Process, Rank, State
from paceline.observe.verdict import Cause


@dataclass(frozen=True)
class Absence:
    """Why a rank does not come: `doing` continues the sentence that begins with "it"."""

    cause: Cause
    doing: str
    is_fault: bool = True


def explain(rank: Rank) -> Absence:
    """Returns why `rank` does not come."""
    if rank.ending is not None:
        return Absence(_CAUSES.get(rank.ending.manner, Cause.EXITED), _end_of(rank))
    process, place = rank.process, rank.place
    if process is not None and process.state is State.ENDED:
        return Absence(Cause.KILLED, "has ended")
    if process is not None and process.state in STILL:
        cause = Cause.SWAPPING if process.state is State.SWAPS else Cause.STOPPED
        return Absence(cause, f"{process.state.value}{_remedy(process.state)}{_at(place)}")
    if place is None and process is None and rank.calls:
        last = max(rank.calls, key=lambda call: call.arrived_s)
        return Absence(Cause.USER_CODE, f"made no other call after {last}, and its stack is not known")
    if place is None and process is None:
        return Absence(Cause.UNKNOWN, "left nothing that could be read")
    where = f"is {place}" if place is not None else "is in a place that is not known"
    if process is not None and process.is_busy:
        return Absence(Cause.BUSY, f"{where} and works there ({_work(process)})", is_fault=False)
    if place is not None and place.is_loader:
        return Absence(Cause.LOADER, where)
    return Absence(Cause.USER_CODE, where)


_CAUSES = {
    Manner.FINISHED: Cause.LEFT,
    Manner.EXCEPTION: Cause.EXCEPTION,
    Manner.KILLED: Cause.KILLED,
    Manner.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
}


def _end_of(rank: Rank) -> str:
    assert rank.ending is not None
    if rank.ending.manner is Manner.FINISHED:
        last = max((call.sequence for call in rank.calls), default=0)
        return f"has come to the end of its script{f' after call {last}' if last else ''}"
    return f"has ended ({rank.ending.how})"


def _at(place: Place | None) -> str:
    return f" while it is {place}" if place is not None and (place.what or place.line) else ""


def _remedy(state: State) -> str:
    return " (`kill -CONT` lets it go on)" if state is State.STOPPED else ""


def _work(process: Process) -> str:
    if process.waited_share > max(0.2, process.cores):
        return f"it waits for a core {min(1.0, process.waited_share):.0%} of the time"
    if process.cores >= 0.2 or process.state is State.RUNS:
        return f"it uses {process.cores:.1f} cores"
    return "it goes from line to line" if process.moves else "it reads or writes files"
