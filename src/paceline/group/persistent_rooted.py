"""Persistent forms of the collectives that have a root, and of messages; `persistent_calls.py` describes them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.durations import Timeout
from paceline.group.arguments import checked_tag, root_rank
from paceline.group.buffers import Tensors, as_list
from paceline.group.default import Group, resolve
from paceline.group.persistent import PersistentCall, RepeatedCall, all_tensors, nothing, prepared_call
from paceline.group.planning import plan_broadcast, plan_gather, plan_reduce, plan_scatter
from paceline.group.point_to_point import peer_rank
from paceline.group.reduce_op import ReduceOp, Reduction
from paceline.group.work import Work


def broadcast_init(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `broadcast`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("broadcast")
    root = root_rank(chosen, src, group_src, "broadcast", "src")
    plan = plan_broadcast(tensor, root, chosen.timeout_ns)

    def make(async_op: bool) -> Work | None:
        return chosen.broadcast(tensor, root, async_op, timeout)

    return prepared_call("broadcast", chosen, plan, make, all_tensors([tensor]), timeout)


def reduce_init(
    tensor: Tensors,
    dst: int | None = None,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `reduce`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("reduce")
    root = root_rank(chosen, dst, group_dst, "reduce", "dst")
    plan = plan_reduce(chosen, tensor, root, op, chosen.timeout_ns)

    def make(async_op: bool) -> Work | None:
        return chosen.reduce(tensor, root, op, async_op, timeout)

    return prepared_call("reduce", chosen, plan, make, all_tensors([tensor]), timeout)


def gather_init(
    tensor: Tensors,
    gather_list: Sequence[Tensors] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `gather`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("gather")
    root = root_rank(chosen, dst, group_dst, "gather", "dst", 0)
    plan = plan_gather(chosen, gather_list, tensor, root, chosen.timeout_ns)

    def make(async_op: bool) -> Work | None:
        return chosen.gather(gather_list, tensor, root, async_op, timeout)

    return prepared_call("gather", chosen, plan, make, all_tensors([tensor, *(gather_list or [])]), timeout)


def scatter_init(
    tensor: Tensors,
    scatter_list: Sequence[Tensors] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `scatter`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("scatter")
    root = root_rank(chosen, src, group_src, "scatter", "src", 0)
    plan = plan_scatter(chosen, tensor, scatter_list, root, chosen.timeout_ns)

    def make(async_op: bool) -> Work | None:
        return chosen.scatter(tensor, scatter_list, root, async_op, timeout)

    return prepared_call("scatter", chosen, plan, make, all_tensors([tensor, *(scatter_list or [])]), timeout)


def send_init(
    tensor: Tensors,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `send`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("send")
    listed = as_list(tensor, "send")
    peer = peer_rank(chosen, dst, group_dst, "send", "dst")
    checked_tag(tag, "send")
    return RepeatedCall("send", lambda async_op: chosen.send(listed, peer, tag, async_op, timeout), listed)


def recv_init(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `recv`; its source must be given."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("recv")
    listed = as_list(tensor, "recv")
    peer = peer_rank(chosen, src, group_src, "recv", "src")
    checked_tag(tag, "recv")
    return RepeatedCall("recv", lambda async_op: chosen.recv(listed, peer, tag, async_op, timeout), listed)
