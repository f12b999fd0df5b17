"""Join: a context for training on uneven inputs, in which ranks without inputs still participate in collectives.

The protocol is the same as in `torch.distributed.algorithms.join`: each object that communicates in a training step is
a `Joinable`. On a rank that has run out of inputs, the `JoinHook` of each object runs the same collectives without
contributing data.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work

_FAR_BEHIND = 1000  # a rank warns after this number of steps without inputs


class JoinHook:
    """Runs the collectives of a joinable on a rank that has run out of inputs."""

    def main_hook(self) -> None:
        """Runs the collectives of one training step; called repeatedly while any rank has inputs."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Runs once, when all ranks have run out of inputs.

        Args:
            is_last_joiner: whether this rank was among the last to run out of inputs.
        """


@dataclass(frozen=True)
class JoinConfig:
    """The settings of the `Join` context to which a joinable belongs."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


class Joinable(ABC):
    """Base class for objects that communicate in each training step, after calling `Join.notify_join_context`."""

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: object) -> JoinHook:
        """Returns the hook; `Join` passes its own `kwargs` to all joinables."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the tensors that ranks exchange."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup:
        """The process group in which the joinable calls its collectives."""


class Join:
    """A context in which ranks may run out of inputs at different times.

    Args:
        joinables: the objects that communicate in a step, all in the same process group. Hooks are called in this
            order.
        enable: whether the context has any effect.
        throw_on_early_termination: whether all ranks raise an error as soon as one rank has run out of inputs.
        kwargs: keyword arguments for each joinable's `join_hook`.

    Raises:
        ValueError: there are no joinables, or they have different process groups.
        RuntimeError: a rank has run out of inputs, and `throw_on_early_termination` is set.

    Example::

        with paceline.Join([model, optimizer]):
            for inputs, targets in loader:  # its length differs between ranks
                ...
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: object,
    ) -> None:
        if not joinables:
            raise ValueError("Join got no joinables; pass at least one, for example the wrapped module")
        for joinable in joinables:
            if not hasattr(joinable, "join_process_group"):
                raise TypeError(
                    f"Join got a {type(joinable).__name__}, which is not a Joinable; wrap the module in "
                    "DistributedDataParallel first, or pass an optimizer of Paceline"
                )
        group = joinables[0].join_process_group
        for joinable in joinables:
            if joinable.join_process_group is not group:
                raise ValueError(
                    f"Join got joinables of {group} and {joinable.join_process_group}; all must have one process group"
                )
        self._joinables = list(joinables)
        self._hooks = [joinable.join_hook(**kwargs) for joinable in joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._group = group
        self._device = joinables[0].join_device

    def __enter__(self) -> None:
        for index, joinable in enumerate(self._joinables):
            joinable._join_config = JoinConfig(self._enable, self._throw, is_first_joinable=index == 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for joinable in self._joinables:
            joinable._join_config = JoinConfig()
        if not self._enable or kind is not None:
            return
        shadowed = 0
        while self._count_active():
            if self._throw:
                self._stop_all_ranks()
            for hook in self._hooks:
                hook.main_hook()
            shadowed += 1
            if shadowed == _FAR_BEHIND:
                warnings.warn(
                    f"rank {self._group.me.rank} ran out of inputs {_FAR_BEHIND} steps before others, and waits for "
                    "them; distribute the inputs more evenly",
                    stacklevel=2,
                )
        for hook in self._hooks:
            hook.post_hook(shadowed == 0)

    def _count_active(self) -> int:
        active = torch.zeros(1, device=self._device)
        self._group.all_reduce(active)
        return int(active.item())

    def _stop_all_ranks(self) -> None:
        self._group.all_reduce(torch.ones(1, device=self._device))
        raise RuntimeError(
            f"rank {self._group.me.rank} ran out of inputs while other ranks have more, and "
            "throw_on_early_termination=True requests to stop then; omit it to let them continue"
        )

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """Announces a step on this rank; a joinable calls this method before its own collectives in the step.

        Returns:
            The `Work` of the collective that counts active ranks, if `joinable` is the first one in the context;
            otherwise None.

        Raises:
            RuntimeError: another rank has run out of inputs, and `throw_on_early_termination` is set.
        """
        config = joinable._join_config
        if not (config.enable and config.is_first_joinable):
            return None
        group = joinable.join_process_group
        work = group.all_reduce(torch.ones(1, device=joinable.join_device), async_op=True)
        if config.throw_on_early_termination:
            stopped = torch.zeros(1, device=joinable.join_device)
            group.all_reduce(stopped)
            if stopped.item():
                raise RuntimeError(
                    f"rank {group.me.rank}: {int(stopped.item())} of {group.size()} ranks ran out of "
                    "inputs, and throw_on_early_termination=True requests to stop then; omit it to continue without "
                    "them"
                )
        return work
