"""Cost model for the algorithms, in which a message costs alpha, each byte beta, and each reduced byte gamma.

The terms follow Hockney 1994 for a message, Thakur, Rabenseifner, Gropp 2005 for trees and for halving and doubling,
and Patarasuk and Yuan 2009 for rings. A rank sends one message and receives one message at a time. The formulas assume
that ranks are numbered host by host, and that the ranks on a host share its network link. Each algorithm's file defines
`COSTS` next to `OFFERS`; `algorithms.py` evaluates these costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

PIPE_NBYTES = 128 << 10
"""The number of bytes in a long slice that a rank receives before it starts to forward them."""


@dataclass(frozen=True)
class LinkCost:
    """The cost of a message on a link.

    Attributes:
        alpha_s: the duration of an empty message, in seconds.
        beta_s_per_byte: the additional seconds for each byte.
        overhead_s: the part of alpha during which the message occupies its ranks; None (unknown) means half of alpha.
    """

    alpha_s: float
    beta_s_per_byte: float
    overhead_s: float | None = None

    @property
    def busy_s(self) -> float:
        """The time, in seconds, for which a message of any length occupies its ranks."""
        return self.alpha_s / 2 if self.overhead_s is None else self.overhead_s


@dataclass(frozen=True)
class CostModel:
    """The costs of a link within a host, of a host's network link, and of reducing one byte."""

    within_host: LinkCost
    between_hosts: LinkCost
    gamma_s_per_byte: float


@dataclass(frozen=True)
class Case:
    """A call; `nbytes` is the length of a rank's longest buffer, such as all blocks of a gather or an all-to-all."""

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
        """The number of ranks on the largest host."""
        return max(self.host_sizes)

    @property
    def is_even(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len(set(self.host_sizes)) == 1

    @property
    def block(self) -> float:
        """The number of bytes in one rank's block."""
        return self.nbytes / self.n

    @property
    def gamma(self) -> float:
        """The cost, in seconds, of reducing a byte."""
        return self.model.gamma_s_per_byte

    @property
    def slowest(self) -> LinkCost:
        """The link that is the slowest when all ranks send at the same time."""
        return self.model.between_hosts if self.n_hosts > 1 else self.model.within_host

    def link(self, distance: int) -> LinkCost:
        """The link between two ranks whose numbers differ by `distance`."""
        crosses = self.n_hosts > 1 and distance >= self.local
        return self.model.between_hosts if crosses else self.model.within_host


Cost: TypeAlias = Callable[[Case], float]
"""The closed-form expression for one operation: the duration of a call, in seconds."""


def message_s(link: LinkCost, nbytes: float, extra_s_per_byte: float = 0) -> float:
    """Returns the duration of a message in seconds; `extra_s_per_byte` is added per byte, for example for reducing."""
    return link.alpha_s + nbytes * (link.beta_s_per_byte + extra_s_per_byte)


def doubling_rounds(n: int) -> int:
    """Returns the number of rounds needed to reach n ranks if each round doubles the number of ranks reached."""
    return (n - 1).bit_length()
