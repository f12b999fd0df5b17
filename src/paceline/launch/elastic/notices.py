"""What the user is shown about a worker of an elastic job that has ended."""

from __future__ import annotations

from paceline.launch.elastic.replacement import Close, Life, Replace
from paceline.launch.failures import Failure


def manner(life: Life, failure: Failure | None) -> str:
    """Returns how a worker has ended: in a few words, with its exception or the kernel's figures if there are any."""
    if life.is_fenced:
        return "was stopped by a signal, so it was killed"
    if failure is None:
        return "has ended"
    if failure.record is not None:
        return f"failed: {failure.summary}"
    return f"failed: {failure.how}" if failure.memory is None else f"failed: {failure.how}: {failure.memory}"


def consequence(decision: Replace | Close) -> str:
    """Returns what follows."""
    if isinstance(decision, Replace):
        return f"another worker takes its place{f' in {decision.after_s:g} s' if decision.after_s else ''}"
    if decision.reason is not None:
        return f"nobody takes its place: {decision.reason}"
    return "it was asked to leave, so nobody takes its place"


def of_slots(first: int, count: int, slots: int) -> str:
    """Returns which of a job's slots are on this machine."""
    if count == 1:
        return f"slot {first} of {slots} is here"
    return f"slots {first} to {first + count - 1} of {slots} are here"
