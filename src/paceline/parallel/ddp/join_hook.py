"""What DistributedDataParallel does in `Join`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.group.process_group import ProcessGroup
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.join import Join, JoinHook
from paceline.parallel.tracked_tensors import collect_tracked

if TYPE_CHECKING:
    from paceline.parallel.ddp.module import DistributedDataParallel


class DdpJoinHook(JoinHook):
    """Shadows the collectives of a module's forward and backward."""

    def __init__(self, model: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._model = model
        self._own_gradients: list[torch.Tensor | None] | None = None
        model._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Takes part in a step with zeros; an optimizer that steps after it gets the others' average."""
        active, syncs, senders = _exchange(self._model.process_group, active=False, syncs=False, sends_buffers=False)
        if not any(syncs):
            return
        if any(senders):
            self._model._watched.send_buffers(senders.index(True))
        _set_scale(self._model, sum(active))
        reducer = self._model._reducer
        if self._own_gradients is None:
            self._own_gradients = reducer.exchange.gradients()
        reducer.join_with_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies the model of a rank that trained longest to all; puts back this rank's own gradients."""
        group = self._model.process_group
        last, _, _ = _exchange(group, active=is_last_joiner, syncs=False, sends_buffers=False)
        broadcast_tensors(collect_tracked(self._model.module).tensors(), group, last.index(True))
        exchange = self._model._reducer.exchange
        exchange.scale = 1.0
        if self._own_gradients is not None:
            exchange.set_gradients(self._own_gradients)


def announce_step(model: DistributedDataParallel) -> int:
    """Tells ranks that have run out that this one makes a step; returns the rank whose buffers are taken."""
    Join.notify_join_context(model)
    syncs = model.require_backward_grad_sync
    sends_buffers = syncs and model.broadcast_buffers and model.training and model._watched.has_buffers()
    active, _, senders = _exchange(model.process_group, active=True, syncs=syncs, sends_buffers=sends_buffers)
    _set_scale(model, sum(active))
    return senders.index(True) if any(senders) else 0


def _set_scale(model: DistributedDataParallel, active: int) -> None:
    divides_by = model.process_group.size() if model._divide_by_initial_world_size else active
    model._reducer.exchange.scale = model.process_group.size() / divides_by


def _exchange(
    group: ProcessGroup, active: bool, syncs: bool, sends_buffers: bool
) -> tuple[list[bool], list[bool], list[bool]]:
    """By rank: who makes a step, whose backward will reduce, who copies buffers first."""
    own = torch.tensor([active, syncs, sends_buffers], device="cpu")
    everyones = [torch.empty_like(own) for _ in range(group.size())]
    group.all_gather(everyones, own)
    columns = torch.stack(everyones, 1).tolist()
    return columns[0], columns[1], columns[2]
