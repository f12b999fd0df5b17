"""The interface of a process group, for the modules that `process_group.py` itself is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from paceline.durations import Timeout
from paceline.engine.failures import Member
from paceline.group.buffers import Tensors
from paceline.group.options import Options
from paceline.group.reduce_op import ReduceOp, Reduction
from paceline.group.work import Work


class BaseGroup(ABC):
    """A process group as the modules below `process_group.py` see it.

    Attributes:
        ranks: the ranks of the group's members in the default group, in the order of their group ranks.
        name: the group's name in messages.
    """

    ranks: list[int]
    name: str

    @property
    @abstractmethod
    def me(self) -> Member:
        """Returns this rank with its host and process."""

    @abstractmethod
    def rank(self) -> int:
        """Returns this process's rank in the group."""

    @property
    @abstractmethod
    def members(self) -> tuple[Member, ...]:
        """Returns the ranks with their hosts and processes, in the order of their group ranks."""

    @abstractmethod
    def size(self) -> int:
        """Returns the number of ranks."""

    @property
    @abstractmethod
    def timeout(self) -> Timeout:
        """Returns how long calls wait for the other ranks."""

    @abstractmethod
    def all_reduce(
        self, tensors: Tensors, op: Reduction = ReduceOp.SUM, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Reduces `tensors` over all ranks, in place."""

    @abstractmethod
    def all_gather(
        self, outputs: Sequence[Tensors], tensors: Tensors, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Copies every rank's `tensors` to all ranks."""

    @abstractmethod
    def reduce_scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors],
        op: Reduction | Options = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Reduces the ranks' `inputs[r]` into rank r's `output`."""

    @abstractmethod
    def all_to_all(
        self,
        outputs: Sequence[Tensors],
        inputs: Sequence[Tensors],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies `inputs[r]` to rank r."""

    @abstractmethod
    def barrier(self, async_op: bool | Options | None = None, timeout: Timeout | None = None) -> Work | None:
        """Waits until every rank has called it."""

    @abstractmethod
    def recv(
        self, tensors: Tensors, src: int = -1, tag: int = 0, async_op: bool = True, timeout: Timeout | None = None
    ) -> Work:
        """Receives a message into `tensors`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the group for this rank."""
