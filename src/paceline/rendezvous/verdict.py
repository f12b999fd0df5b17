"""The verdict on a meeting: complete, or why the ranks cannot go on. Every rank waits for it and learns the same.

A rank leaves a last will before it claims its number, and takes it back when its group has formed. So the store itself
overturns the verdict when a rank dies in between, also the verdict "complete" before the group has formed.
"""

from __future__ import annotations

from paceline.store.base import Store

COMPLETE = "complete"
KEY = "verdict"
ADVICE = "look at its output and, if it was killed, at the memory it used (dmesg)"

_TIMEOUT = "timeout: "


def settle(store: Store, verdict: str) -> None:
    """Settles the verdict, unless there is one."""
    store.compare_set(KEY, b"", verdict)


def settle_timeout(store: Store, absence: str) -> str:
    """Settles that the time is over, unless there is a verdict; the verdict."""
    return store.compare_set(KEY, b"", _TIMEOUT + absence).decode()


def timeout_in(verdict: str) -> str | None:
    """Who was absent, if the verdict is that the time was over."""
    return verdict.removeprefix(_TIMEOUT) if verdict.startswith(_TIMEOUT) else None


def reason_against(store: Store) -> str | None:
    """Why the ranks cannot go on; None if there is no reason, or no verdict yet."""
    if not store.check([KEY]):
        return None
    verdict = store.get(KEY).decode()
    return None if verdict == COMPLETE else verdict


def leave_will(store: Store, end: str) -> None:
    """From now on the end of this process is the verdict; `end` says whose it is, and when it came."""
    store.set_last_will(KEY, f"{end}; {ADVICE}")


def take_back_will(store: Store) -> None:
    """From now on the end of this process is no concern of the meeting."""
    store.set_last_will(KEY, None)
