"""Which rank updates which bytes of which parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

ALIGNMENT_BYTES = 256  # of cuts: whole elements of every type, whole cache lines, and vectors as they would be uncut
_UNEVEN = 0.02  # of an even share, that a rank may have more before a parameter is cut

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip


class Part(NamedTuple):
    """The bytes of a parameter from `start` to before `stop`, and the rank that updates them."""

    start: int
    stop: int
    owner: int


def is_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether the optimizer is known to treat every element by itself, so that it may be given parts of parameters.

    Only torch's own classes are known; what is derived from them may look at a parameter as a whole.
    """
    return optimizer_class in _ELEMENTWISE


def divide(sizes: Sequence[int], may_cut: Sequence[bool], loads: list[int]) -> list[list[Part]]:
    """Gives each parameter, largest first, to the rank that has least so far, and cuts those that are too much for it.

    Greedy by size, largest first, is never more than 4/3 of the best partition in whole parameters (Graham 1969), and
    as torch does it. What a parameter has beyond an even share goes to the next rank; that happens at most once a rank.

    Args:
        sizes: bytes of each parameter.
        may_cut: whether it can be cut.
        loads: bytes that each rank has already; brought up to date.

    Returns:
        For each parameter its parts, in order.

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
