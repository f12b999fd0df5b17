"""Which of two parts of a job that do not see each other may go on."""

from __future__ import annotations

from collections.abc import Collection


def has_quorum(members: Collection[str], dead: Collection[str], reachable: Collection[str]) -> bool:
    """Returns whether the part that reaches `reachable` may install a view after the one of `members`.

    Only deaths that were confirmed, by the machine on which the worker ran, make a view smaller. A part needs more than
    half of those left; of two halves, the one with the member whose name is the lowest goes on. A view all of whose
    members are dead has nobody left who could disagree.
    """
    left = set(members) - set(dead)
    if not left:
        return True
    here = left & set(reachable)
    return 2 * len(here) > len(left) or (2 * len(here) == len(left) and min(left) in here)
