"""Decides which rank updates which bytes of which parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.parallel.lion import Lion

ALIGNMENT_BYTES = 256  # of cuts, so that they keep whole elements of every dtype, whole cache lines, and whole vectors
_UNEVEN = 0.02  # the fraction by which a rank may exceed an even share before a parameter is cut

_TORCHS = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_ELEMENTWISE = frozenset([Lion, *(getattr(torch.optim, name) for name in _TORCHS)])


class Part(NamedTuple):
    """The bytes of a parameter from `start` to before `stop`, and the rank that updates them."""

    start: int
    stop: int
    owner: int


def is_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Returns whether the optimizer is known to update elements independently, so that parameters may be cut.

    Only torch's own classes and `Lion` are known; a class derived from them may look at a parameter as a whole.
    """
    return optimizer_class in _ELEMENTWISE


def divide(sizes: Sequence[int], may_cut: Sequence[bool], loads: list[int]) -> list[list[Part]]:
    """Gives each parameter, largest first, to the rank that has least so far, and cuts those that exceed its share.

    Largest first is at most 4/3 of the best partition into whole parameters (Graham 1969), and is what torch does. The
    bytes of a parameter beyond an even share go to the next rank; that happens at most once for each rank.

    Args:
        sizes: bytes of each parameter.
        may_cut: for each parameter, whether it may be cut.
        loads: bytes that each rank has already; this function updates them.

    Returns:
        The parts of each parameter, in order.

    >>> divide([256, 1280, 512, 512], [True] * 4, loads := [0, 0]), loads
    ([[Part(start=0, stop=256, owner=1)], [Part(start=0, stop=1280, owner=0)], [Part(start=0, stop=512, owner=1)], \
[Part(start=0, stop=512, owner=1)]], [1280, 1280])
    >>> divide([1024], [True], loads := [0, 0])
    [[Part(start=0, stop=512, owner=0), Part(start=512, stop=1024, owner=1)]]
    """
    even = -(-(sum(loads) + sum(sizes)) // len(loads))
    parts: list[list[Part]] = [[] for _ in sizes]
    for index in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        start, stop = 0, sizes[index]
        while start < stop or not parts[index]:
            rank = loads.index(min(loads))
            room = -((loads[rank] - even) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # rounded up
            fits = loads[rank] + stop - start <= even * (1 + _UNEVEN)
            end = stop if fits or room <= 0 or not may_cut[index] else min(stop, start + room)
            parts[index].append(Part(start, end, rank))
            loads[rank] += end - start
            start = end
    return parts
