"""Point-to-point messages between ranks.

`src` and `dst` are ranks in the default group, and `group_src` and `group_dst` are ranks in `group`; pass either one.
If `group` is None, the default group is used; on a rank that is not in `group` a call does nothing. Between two ranks,
messages with the same `tag` (a non-negative integer) arrive in the order in which they are sent; a receive matches only
messages with its tag. A list of tensors of one dtype may be passed for any tensor. Both sides must pass the same dtype
and number of elements. `timeout` is a timedelta or a number of seconds; None means the group's timeout.

All raise:
    ValueError: the peer is this rank, is not in the group, or is specified twice or not at all; or the tag is negative
        or has more than 31 bits.
    TypeError: a tensor's device, layout or dtype is not supported.
    CollectiveMismatchError: the two sides do not agree on the dtype or the number of elements. The group remains
        usable.
    CollectiveTimeoutError: the other side did not make its call in time. The message reports whether the group remains
        usable.
    PeerLostError: the peer died or left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.group.buffers import Tensors, as_list, count_elements
from paceline.comm.group.call_plan import checked_tag
from paceline.comm.group.default import Group, get_global_rank, resolve
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ANY_SOURCE, ProcessGroup
from paceline.comm.group.work import Work
from paceline.durations import Timeout
from paceline.errors import short_repr


@eager
def send(
    tensor: Tensors,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Sends `tensor` to rank `dst`; returns when the tensor may be modified again."""
    chosen = resolve(group, "send")
    if chosen is None:
        return
    peer = peer_rank(chosen, dst, group_dst, "send", "dst")
    chosen.send(as_list(tensor, "send"), peer, checked_tag(tag, "send"), False, timeout)


@eager
def recv(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> int:
    """Receives a message into `tensor`, from any rank in the group if no source is specified.

    Returns:
        The sender's rank in the default group, or -1 on a rank that is not in `group`.
    """
    chosen = resolve(group, "recv")
    if chosen is None:
        return -1
    listed = as_list(tensor, "recv")
    if src is None and group_src is None:
        return get_global_rank(chosen, receive_from_any(chosen, listed, checked_tag(tag, "recv"), timeout))
    peer = peer_rank(chosen, src, group_src, "recv", "src")
    chosen.recv(listed, peer, checked_tag(tag, "recv"), False, timeout)
    return chosen.ranks[peer]


@eager
def isend(
    tensor: Tensors,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Starts sending `tensor` to rank `dst`.

    Returns:
        A `Work`, or None on a rank that is not in `group`. `tensor` must not be modified before the work is complete.
    """
    chosen = resolve(group, "isend")
    if chosen is None:
        return None
    peer = peer_rank(chosen, dst, group_dst, "isend", "dst")
    return chosen.send(as_list(tensor, "isend"), peer, checked_tag(tag, "isend"), True, timeout)


@eager
def irecv(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Starts receiving a message into `tensor`, from any rank in the group if no source is specified.

    Returns:
        A `Work` whose `source_rank()` is the sender's group rank, or None on a rank that is not in `group`. `tensor`
        must not be accessed before the work is complete.
    """
    chosen = resolve(group, "irecv")
    if chosen is None:
        return None
    anyone = src is None and group_src is None
    peer = ANY_SOURCE if anyone else peer_rank(chosen, src, group_src, "irecv", "src")
    return chosen.recv(as_list(tensor, "irecv"), peer, checked_tag(tag, "irecv"), True, timeout)


class P2POp:
    """A send or a receive for `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv`.
        tensor: the tensor to send or to receive into.
        peer, group_peer: the other rank, in the default group or in `group`; pass either one.
        group: the group; the default group if None.
        tag: the message's tag; see `send`.
    """

    def __init__(
        self,
        op: object,
        tensor: Tensors,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError(f"P2POp: op is {short_repr(op)}; it must be paceline.isend or paceline.irecv")
        self.op = op
        self.tensor = tensor
        self._count = count_elements(as_list(tensor, "P2POp"))
        self.group = group
        self.tag = checked_tag(tag, "P2POp")
        self.peer = peer
        self.group_peer = group_peer
        chosen = resolve(group, "irecv")
        if chosen is not None:
            self.group_peer = peer_rank(chosen, peer, group_peer, "P2POp", "peer")
            self.peer = chosen.ranks[self.group_peer]

    def __repr__(self) -> str:
        name = "isend" if self.op is isend else "irecv"
        return f"P2POp({name}, peer={self.peer}, tag={self.tag}, {self._count} elements)"


@eager
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Starts all sends and receives in a list; their order in the list does not matter.

    Returns:
        A `Work` for each entry, in the order of the list, except for entries whose group does not contain this rank.

    Raises:
        ValueError: the list is empty.
        TypeError: an entry is not a `P2POp`.
    """
    if not isinstance(p2p_op_list, (list, tuple)):
        raise TypeError(
            f"batch_isend_irecv: the argument is a {type(p2p_op_list).__name__}; it must be a list of P2POp objects"
        )
    if not p2p_op_list:
        raise ValueError("batch_isend_irecv: the list is empty; it must have at least one P2POp")
    for op in p2p_op_list:
        if not isinstance(op, P2POp):
            raise TypeError(
                f"batch_isend_irecv: the list contains a {type(op).__name__}; it must contain only P2POp objects"
            )
    works = [
        isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
        if op.op is isend
        else irecv(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer)
        for op in p2p_op_list
    ]
    return [work for work in works if work is not None]


def peer_rank(group: ProcessGroup, rank: int | None, group_rank: int | None, call: str, name: str) -> int:
    """Returns the group rank of the peer, which must not be this rank; see `root_rank` for the ways to specify it."""
    peer = group.rank_map.root_rank(rank, group_rank, call, name)
    group.rank_map.require_peer(peer, call, name)
    return peer


def receive_from_any(group: ProcessGroup, tensors: list[torch.Tensor], tag: int, timeout: Timeout | None) -> int:
    """Receives the first message to arrive; returns the sender's group rank."""
    work = group.recv(tensors, ANY_SOURCE, tag, True, timeout)
    assert work is not None
    work.wait()
    return work.source_rank()
