"""A group that rounds what its sums send between hosts, unless a call says otherwise."""

from __future__ import annotations

from paceline import _core
from paceline.durations import Timeout
from paceline.group.buffers import Tensors
from paceline.group.planning import Plan
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp, Reduction
from paceline.group.wire import Wire, WireLike, is_quantisable, with_wire
from paceline.group.work import Work
from paceline.schedule.steps import Operation

LEAST_ELEMENTS = 1024
"""Shorter tensors travel as they are: norms and counts are among them, and rounding them would save no time."""

_ROUNDED = (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)


class QuantisingGroup(ProcessGroup):
    """A group with a `wire` of its own, for all_reduce and reduce_scatter of floats.

    all_gather stays exact: it moves parameters, which nobody would see drift.
    """

    def all_reduce(
        self,
        tensors: Tensors,
        op: Reduction = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
        any_order: bool = False,
        wire: WireLike = None,
    ) -> Work | None:
        """Reduces `tensors` over all ranks, in place; as `ProcessGroup.all_reduce`."""
        # With a time-out the call is not made by the shortest way, which passes `_run` by.
        return super().all_reduce(tensors, op, async_op, timeout or self.timeout, any_order, wire)

    def _run(self, plan: Plan, async_op: bool | None) -> Work | None:
        return super()._run(self._with(self.wire, plan), async_op)

    def prepare(self, plan: Plan) -> _core.PreparedCall | None:
        """Returns the planned call for being made many times, with error feedback of its own."""
        return super().prepare(self._with(self.wire and Wire(self.wire), plan))

    def _with(self, wire: WireLike, plan: Plan) -> Plan:
        call, buffers = plan
        is_rounded = (
            not call.wire
            and call.operation in _ROUNDED
            and call.count >= LEAST_ELEMENTS
            and is_quantisable(call)
            and all(tensor.is_cpu for tensor in buffers.kept)
        )
        return with_wire(plan, wire, self.size()) if is_rounded else plan
