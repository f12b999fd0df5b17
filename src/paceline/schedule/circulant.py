"""Reduce-scatter and all-gather on a circulant graph: few rounds as in a tree, few bytes as in a ring, for any number.

A member first holds contributions to the blocks of all n members. In a round it keeps those of itself and the members
that follow up to a distance, and sends the rest, each part straight to a member at whose place it begins. So with parts
of half (`radix` 2), what is left halves in each round, as in Träff 2024, "Optimal, non-pipelined reduce-scatter and
allreduce algorithms"; more parts save rounds where messages take long. No byte is sent more often than in a ring. Every
member does the same relative to its own place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.schedule.cost_model import LinkCost
from paceline.schedule.steps import Buffer, Slice, Step, combine, receive, runs, send


class Round(NamedTuple):
    """What is reduced to the blocks at distances below `width` from those below `reach`, in parts of `width`."""

    width: int
    reach: int

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The parts that are sent, as distances and numbers of blocks."""
        return [(at, min(self.width, self.reach - at)) for at in range(self.width, self.reach, self.width)]


def rounds(n: int, radix: int) -> list[Round]:
    """Returns the rounds of a reduce-scatter among n members; an all-gather has them in reverse.

    They are as few as parts of a `radix`-th allow, and have no more parts than so few rounds need.
    """
    found = _divided(n, radix)
    while radix > 2 and len(smaller := _divided(n, radix - 1)) == len(found):
        found, radix = smaller, radix - 1
    return found


def _divided(n: int, radix: int) -> list[Round]:
    found = []
    while n > 1:
        width = -(-n // radix)
        found.append(Round(width, n))
        n = width
    return found


def in_order_of_need(n: int, me: int, radix: int) -> list[int]:
    """Returns the blocks in the order in which member `me` sends them in a reduce-scatter, its own last."""
    first = rounds(n, radix)[0].width if n > 1 else 0
    return [(me + first + at) % n for at in range(n)]


def reduce_phase(
    members: Sequence[int], me: int, blocks: Sequence[int], radix: int, *, final: bool = True
) -> list[Step]:
    """Returns a reduce-scatter of OUTPUT in place, after which member i has the sums of blocks[i].

    `members[me]` is this rank; there are as many blocks as members.
    """
    n, steps = len(members), list[Step]()
    for each in rounds(n, radix):
        for at, count in each.parts:
            steps += [send(members[(me + at) % n], src) for src in _around(blocks, me + at, count)]
        for at, count in each.parts:
            complete = final and each.width == 1 and at == each.reach - 1
            source = members[(me - at) % n]
            steps += [combine(source, dst, dst, complete) for dst in _around(blocks, me, count)]
    return steps


def gather_phase(members: Sequence[int], me: int, blocks: Sequence[int], radix: int) -> list[Step]:
    """Returns an all-gather of OUTPUT: blocks[i], which member i holds, ends up with all members."""
    n, steps = len(members), list[Step]()
    for each in reversed(rounds(n, radix)):
        for at, count in each.parts:
            steps += [send(members[(me - at) % n], src) for src in _around(blocks, me, count)]
        for at, count in each.parts:
            steps += [receive(members[(me + at) % n], dst) for dst in _around(blocks, me + at, count)]
    return steps


def _around(blocks: Sequence[int], first: int, count: int) -> list[Slice]:
    return runs(Buffer.OUTPUT, _turning(blocks, first, count))


def _turning(blocks: Sequence[int], first: int, count: int) -> Iterator[int]:
    return (blocks[(first + at) % len(blocks)] for at in range(count))


def waiting_s(n: int, radix: int, link: LinkCost, calls: int = 1) -> float:
    """Returns the seconds that messages wait in as many phases of n members as `calls` says, one after another.

    The messages of a round are under way together, while each keeps its rank busy for a part of its alpha.
    """
    under_way_s = link.alpha_s - link.busy_s
    return sum(under_way_s + calls * len(each.parts) * link.busy_s for each in rounds(n, radix))
