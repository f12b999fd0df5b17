"""How long each algorithm takes, in closed form: messages cost alpha, bytes beta, reduced bytes gamma.

The terms are the usual ones: Hockney 1994 for a message, Thakur, Rabenseifner, Gropp 2005 for trees and for halving and
doubling, Patarasuk and Yuan 2009 for rings. A rank sends one message and receives one at a time. Ranks are taken to be
numbered host by host; a host's network link is shared by those of its ranks that use it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from paceline.schedule.steps import Operation

PIPE_NBYTES = 128 << 10
"""How much of a long slice a rank has taken before it passes on the first of it."""


@dataclass(frozen=True)
class LinkCost:
    """A message takes alpha_s seconds, and beta_s_per_byte more for each byte."""

    alpha_s: float
    beta_s_per_byte: float


@dataclass(frozen=True)
class CostModel:
    """Links between two ranks of a host, the link of a host to the network, and the reduction of one byte."""

    within_host: LinkCost
    between_hosts: LinkCost
    gamma_s_per_byte: float


@dataclass(frozen=True)
class Case:
    """A call: `nbytes` is the longest buffer of a rank (all blocks of a gather, a scatter, an all-to-all together)."""

    model: CostModel
    nbytes: int
    host_sizes: tuple[int, ...]

    @property
    def n(self) -> int:
        """The number of ranks."""
        return sum(self.host_sizes)

    @property
    def n_hosts(self) -> int:
        """The number of hosts."""
        return len(self.host_sizes)

    @property
    def local(self) -> int:
        """The ranks of the largest host."""
        return max(self.host_sizes)

    @property
    def block(self) -> float:
        """The bytes of one rank's block."""
        return self.nbytes / self.n

    @property
    def gamma(self) -> float:
        """Seconds to reduce a byte."""
        return self.model.gamma_s_per_byte

    @property
    def slowest(self) -> LinkCost:
        """The link that sets the pace where all ranks move at once."""
        return self.model.between_hosts if self.n_hosts > 1 else self.model.within_host

    def link(self, distance: int) -> LinkCost:
        """The link between ranks whose numbers differ so much."""
        crosses = self.n_hosts > 1 and distance >= self.local
        return self.model.between_hosts if crosses else self.model.within_host


def seconds(link: LinkCost, nbytes: float, extra_s_per_byte: float = 0) -> float:
    """Return the time of one message whose bytes may also be reduced."""
    return link.alpha_s + nbytes * (link.beta_s_per_byte + extra_s_per_byte)


Form: TypeAlias = Callable[[Case], float]


def _ring_turns(link: LinkCost, n: int, nbytes: float, gamma: float = 0) -> float:
    """n - 1 turns of an n-th each."""
    return (n - 1) * seconds(link, nbytes / n, gamma)


def _chain(case: Case, gamma: float = 0) -> float:
    """A pipe of n - 1 links: a first piece goes through all, the rest follows at the pace of the slowest."""
    piece = min(case.nbytes, PIPE_NBYTES)
    first = (case.n - case.n_hosts) * seconds(case.model.within_host, piece, gamma) + (case.n_hosts - 1) * seconds(
        case.model.between_hosts, piece, gamma
    )
    return first + (case.nbytes - piece) * (case.slowest.beta_s_per_byte + gamma) if case.n > 1 else 0


def _pairwise(case: Case) -> float:
    """In most turns all ranks of a host send to other hosts at once."""
    crossing = case.n - case.local
    per_block = case.block * case.local * case.model.between_hosts.beta_s_per_byte
    return (case.local - 1) * seconds(case.model.within_host, case.block) + crossing * (
        case.model.between_hosts.alpha_s + per_block
    )


RING: dict[Operation, Form] = {
    "all_reduce": lambda case: (
        _ring_turns(case.slowest, case.n, case.nbytes, case.gamma) + _ring_turns(case.slowest, case.n, case.nbytes)
    ),
    "reduce_scatter": lambda case: _ring_turns(case.slowest, case.n, case.nbytes, case.gamma),
    "all_gather": lambda case: _ring_turns(case.slowest, case.n, case.nbytes),
    "gather": lambda case: _ring_turns(case.slowest, case.n, case.nbytes),
    "scatter": lambda case: _ring_turns(case.slowest, case.n, case.nbytes),
    "broadcast": _chain,
    "reduce": lambda case: _chain(case, case.gamma),
    "all_to_all": _pairwise,
    "barrier": lambda case: (2 * case.n - 1) * case.slowest.alpha_s if case.n > 1 else 0,
}


def _halves(case: Case, gamma: float = 0, *, alone: bool = False) -> float:
    """Rounds of 1/2, 1/4, 1/8... of the bytes. Those between hosts have a host's ranks share its link, or one alone."""
    width = 1 << case.n.bit_length() - 1
    total, nbytes, distance = 0.0, case.nbytes / 2, width // 2
    while distance:
        link = case.link(distance if case.n == width else 2 * distance)
        sharing = case.local if link is case.model.between_hosts and not alone else 1
        total += link.alpha_s + nbytes * (sharing * link.beta_s_per_byte + gamma)
        nbytes, distance = nbytes / 2, distance // 2
    return total


def _fold(case: Case, nbytes: float, gamma: float = 0) -> float:
    """What the odd rank of a pair sends, or receives in the end, where the world is no power of two."""
    return seconds(case.link(1), nbytes, gamma) if case.n & (case.n - 1) else 0


def _rounds(n: int) -> int:
    return (n - 1).bit_length()


HALVING_DOUBLING: dict[Operation, Form] = {
    "all_reduce": lambda case: (
        _halves(case, case.gamma) + _halves(case) + _fold(case, case.nbytes, case.gamma) + _fold(case, case.nbytes)
    ),
    "reduce_scatter": lambda case: (
        _halves(case, case.gamma) + _fold(case, case.nbytes, case.gamma) + _fold(case, case.block)
    ),
    "all_gather": lambda case: _halves(case) + _fold(case, case.block) + _fold(case, case.nbytes),
    "reduce": lambda case: _halves(case, case.gamma) + _halves(case, alone=True) + _fold(case, case.nbytes, case.gamma),
    "broadcast": lambda case: _halves(case, alone=True) + _halves(case) + _fold(case, case.nbytes),
    "barrier": lambda case: _rounds(case.n) * case.slowest.alpha_s,
}


def _levels(case: Case, nbytes: float, gamma: float = 0) -> float:
    """Each level of the tree moves all bytes."""
    return sum(seconds(case.link(1 << level), nbytes, gamma) for level in range(_rounds(case.n)))


def _subtrees(case: Case) -> float:
    """Each level of the tree moves the blocks of a subtree."""
    widths = [1 << level for level in range(_rounds(case.n))]
    return sum(seconds(case.link(width), min(width, case.n - width) * case.block) for width in widths)


TREE: dict[Operation, Form] = {
    "all_reduce": lambda case: _levels(case, case.nbytes, case.gamma) + _levels(case, case.nbytes),
    "reduce": lambda case: _levels(case, case.nbytes, case.gamma),
    "broadcast": lambda case: _levels(case, case.nbytes),
    "gather": _subtrees,
    "scatter": _subtrees,
    "all_gather": lambda case: _subtrees(case) + _levels(case, case.nbytes),
    "reduce_scatter": lambda case: _levels(case, case.nbytes, case.gamma) + _subtrees(case),
    "barrier": lambda case: 2 * _levels(case, 0),
}


def _serve(case: Case, nbytes: float, gamma: float = 0) -> float:
    """The middle takes or sends so many bytes from or to all others, one after another."""
    near, far = case.local - 1, case.n - case.local
    return near * seconds(case.model.within_host, nbytes, gamma) + far * seconds(
        case.model.between_hosts, nbytes, gamma
    )


STAR: dict[Operation, Form] = {
    "all_reduce": lambda case: _serve(case, case.nbytes, case.gamma) + _serve(case, case.nbytes),
    "reduce": lambda case: _serve(case, case.nbytes, case.gamma),
    "broadcast": lambda case: _serve(case, case.nbytes),
    "gather": lambda case: _serve(case, case.block),
    "scatter": lambda case: _serve(case, case.block),
    "all_gather": lambda case: _serve(case, case.block) + _serve(case, case.nbytes),
    "reduce_scatter": lambda case: _serve(case, case.nbytes, case.gamma) + _serve(case, case.block),
    "barrier": lambda case: 2 * _serve(case, 0),
}


def _between(case: Case, turns: float, nbytes: float, gamma: float = 0, *, sharing: int = 1) -> float:
    """Messages between hosts; with `sharing` ranks of a host sending at once."""
    link = case.model.between_hosts
    return turns * (link.alpha_s + nbytes * (sharing * link.beta_s_per_byte + gamma))


def _within(case: Case, turns: float, nbytes: float, gamma: float = 0) -> float:
    return turns * seconds(case.model.within_host, nbytes, gamma)


def _rails(case: Case, gamma: float, *, messages: int = 1) -> float:
    """A ring in the host over its ranks' slices, and a ring between hosts over each slice's parts."""
    inside = (case.local - 1) * (messages - 1) * case.model.within_host.alpha_s
    return (
        inside
        + _within(case, case.local - 1, case.nbytes / case.local, gamma)
        + _between(case, case.n_hosts - 1, case.block, gamma, sharing=case.local)
    )


def _leaders_ring(case: Case, gamma: float) -> float:
    return _between(case, case.n_hosts - 1, case.nbytes / case.n_hosts, gamma)


def _through_leaders(case: Case, gamma: float = 0) -> float:
    """All bytes through a tree in the host and a tree between hosts."""
    return _within(case, _rounds(case.local), case.nbytes, gamma) + _between(
        case, _rounds(case.n_hosts), case.nbytes, gamma
    )


def _even(case: Case) -> bool:
    return len(set(case.host_sizes)) == 1


def _hierarchical_all_reduce(case: Case) -> float:
    if _even(case):
        return _rails(case, case.gamma) + _rails(case, 0)
    trees = _within(case, _rounds(case.local), case.nbytes, case.gamma) + _within(
        case, _rounds(case.local), case.nbytes
    )
    return trees + _leaders_ring(case, case.gamma) + _leaders_ring(case, 0)


def _hierarchical_reduce_scatter(case: Case) -> float:
    if _even(case):
        return _rails(case, case.gamma, messages=case.n_hosts)
    trees = _within(case, _rounds(case.local), case.nbytes, case.gamma) + _within(
        case, _rounds(case.local), case.local * case.block / 2
    )
    return trees + _leaders_ring(case, case.gamma)


def _hierarchical_all_gather(case: Case) -> float:
    if _even(case):
        return _rails(case, 0, messages=case.n_hosts)
    trees = _within(case, _rounds(case.local), case.local * case.block / 2) + _within(
        case, _rounds(case.local), case.nbytes
    )
    return trees + _leaders_ring(case, 0)


def _hierarchical_gather(case: Case) -> float:
    """One by one in the host, then a tree between hosts whose last level moves half of all blocks."""
    levels = [min(1 << level, case.n_hosts - (1 << level)) for level in range(_rounds(case.n_hosts))]
    between = sum(_between(case, 1, width * case.local * case.block) for width in levels)
    return _within(case, case.local - 1, case.block) + between


HIERARCHICAL: dict[Operation, Form] = {
    "all_reduce": _hierarchical_all_reduce,
    "reduce_scatter": _hierarchical_reduce_scatter,
    "all_gather": _hierarchical_all_gather,
    "broadcast": _through_leaders,
    "reduce": lambda case: _through_leaders(case, case.gamma),
    "gather": _hierarchical_gather,
    "scatter": _hierarchical_gather,
    "barrier": lambda case: _within(case, 2 * _rounds(case.local), 0) + _between(case, _rounds(case.n_hosts), 0),
}

FORMS: Mapping[str, Mapping[Operation, Form]] = {
    "ring": RING,
    "halving_doubling": HALVING_DOUBLING,
    "tree": TREE,
    "star": STAR,
    "hierarchical": HIERARCHICAL,
}
