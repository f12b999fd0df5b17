"""The verdict on a meeting: "complete", or why the ranks cannot go on. Every rank waits for it and learns the same.

A rank leaves a last will with the store before it claims its number, and takes it back when its group has formed. If
the rank dies in between, the store itself replaces the verdict with the will, even the verdict "complete".
"""

from __future__ import annotations

from paceline.store.base import Store

COMPLETE = "complete"
KEY = "verdict"
ADVICE = "look at its output and, if it was killed, at the memory it used (dmesg)"

_TIMEOUT = "timeout: "


def settle(store: Store, verdict: str) -> None:
    """Sets the verdict, unless there already is one."""
    store.compare_set(KEY, b"", verdict)


def settle_timeout(store: Store, absence: str) -> str:
    """Sets the verdict to a time-out, unless there already is one; returns the verdict that counts."""
    return store.compare_set(KEY, b"", _TIMEOUT + absence).decode()


def timeout_in(verdict: str) -> str | None:
    """Returns who was absent, if the verdict is a time-out; otherwise None."""
    return verdict.removeprefix(_TIMEOUT) if verdict.startswith(_TIMEOUT) else None


def reason_against(store: Store) -> str | None:
    """Returns why the ranks cannot go on; None if nothing prevents it, or there is no verdict yet."""
    if not store.check([KEY]):
        return None
    verdict = store.get(KEY).decode()
    return None if verdict == COMPLETE else verdict


def leave_will(store: Store, end: str) -> None:
    """Makes the end of this process the verdict from now on; `end` says which process it is, and at what point."""
    store.set_last_will(KEY, f"{end}; {ADVICE}")


def take_back_will(store: Store) -> None:
    """Makes the end of this process no longer affect the meeting."""
    store.set_last_will(KEY, None)
