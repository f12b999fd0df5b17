"""What DistributedDataParallel does in `Join`: a rank without inputs takes part in the others' steps with zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.group.process_group import ProcessGroup
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.ddp.reducer import Reducer
from paceline.parallel.ddp.watched import WatchedModule
from paceline.parallel.join import JoinHook


@dataclass(frozen=True)
class _Step:
    """A step: for each rank whether it takes part with inputs, averages gradients, and sends its buffers first."""

    is_active: list[bool]
    averages: list[bool]
    sends_buffers: list[bool]


class UnevenSteps:
    """Exchanges between the ranks within `Join` which of them make the next step, and sets the divisor of gradients.

    Every step begins with one such exchange, in which all ranks take part: those with inputs in their forward, and the
    others in their join hook.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.divides_by_initial_world_size = True
        self._group = group

    def announce(self, reducer: Reducer, averages: bool, sends_buffers: bool) -> int:
        """Announces a step of this rank, and returns the rank whose buffers are copied."""
        step = self._exchange(reducer, is_active=True, averages=averages, sends_buffers=sends_buffers)
        return step.sends_buffers.index(True) if any(step.sends_buffers) else 0

    def follow(self, reducer: Reducer) -> _Step:
        """Returns the step that other ranks announce."""
        return self._exchange(reducer, is_active=False, averages=False, sends_buffers=False)

    def last_rank(self, is_last: bool) -> int:
        """Returns the first of the ranks that have trained longest."""
        return self._gather(is_last, False, False).is_active.index(True)

    def _exchange(self, reducer: Reducer, is_active: bool, averages: bool, sends_buffers: bool) -> _Step:
        step = self._gather(is_active, averages, sends_buffers)
        if any(step.is_active):
            size = self._group.size()
            reducer.set_scale(1.0 if self.divides_by_initial_world_size else size / sum(step.is_active))
        return step

    def _gather(self, is_active: bool, averages: bool, sends_buffers: bool) -> _Step:
        own = torch.tensor([is_active, averages, sends_buffers], device="cpu")
        everyones = [torch.empty_like(own) for _ in range(self._group.size())]
        self._group.all_gather(everyones, own)
        return _Step(*torch.stack(everyones, 1).tolist())


class DdpJoinHook(JoinHook):
    """Makes the calls of a module's forward and backward on a rank that has run out of inputs."""

    def __init__(
        self, reducer: Reducer, watched: WatchedModule, steps: UnevenSteps, group: ProcessGroup, syncs_buffers: bool
    ) -> None:
        self._reducer = reducer
        self._watched = watched
        self._steps = steps
        self._group = group
        self._syncs_buffers = syncs_buffers
        self._own_gradients: list[torch.Tensor | None] | None = None

    def main_hook(self) -> None:
        """Takes part in a step with zeros; an optimizer that steps afterwards uses the others' average."""
        step = self._steps.follow(self._reducer)
        if not any(step.averages):
            return
        if any(step.sends_buffers):
            self._watched.send_buffers(step.sends_buffers.index(True))
        before = self._reducer.join_with_zeros()
        if self._own_gradients is None:
            self._own_gradients = before

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies the model of a rank that has trained longest to all ranks, and restores this rank's gradients."""
        root = self._steps.last_rank(is_last_joiner)
        broadcast_tensors(self._watched.current_tensors(with_buffers=self._syncs_buffers), self._group, root)
        self._reducer.set_scale(1.0)
        if self._own_gradients is not None:
            self._reducer.set_gradients(self._own_gradients)
