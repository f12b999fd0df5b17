"""From one rank to another.

`src` and `dst` are ranks of the default group, `group_src` and `group_dst` ranks of `group`. Messages between two ranks
with the same `tag` arrive in the order in which they are sent; a receiver takes the tag it asks for. Wherever a tensor
is taken, a list of tensors of one type is taken too; both sides pass the same type and number of elements. `timeout` is
the group's if None. On a rank that is not in `group` a call does nothing.

All raise:
    ValueError: the peer is this rank, or not in the group, or given twice, or not at all; or the tag is negative.
    TypeError: tensors that are not dense CPU tensors of one supported type.
    CollectiveMismatchError: the two sides do not agree on the type or the number of elements.
    CollectiveTimeoutError: the other side did not come in time.
    PeerLostError: it died or left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.durations import Timeout
from paceline.group.arguments import root_rank
from paceline.group.buffers import Tensors, as_list
from paceline.group.default import Group, resolve
from paceline.group.eager import eager
from paceline.group.process_group import ProcessGroup
from paceline.group.queries import get_global_rank
from paceline.group.work import Work

ANY_SOURCE = -1


@eager
def send(
    tensor: Tensors,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Sends `tensor`; returns when it may be changed again."""
    chosen = resolve(group)
    if chosen is None:
        return
    peer = peer_rank(chosen, dst, group_dst, "send", "dst")
    chosen.send(as_list(tensor, "send"), peer, _checked(tag, "send"), False, timeout)


@eager
def recv(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> int:
    """Receives into `tensor`, from any rank if no source is given; the rank (of the default group) it came from.

    -1 on a rank that is not in the group.
    """
    chosen = resolve(group)
    if chosen is None:
        return -1
    listed = as_list(tensor, "recv")
    if src is None and group_src is None:
        return get_global_rank(chosen, receive_from_any(chosen, listed, _checked(tag, "recv"), timeout))
    peer = peer_rank(chosen, src, group_src, "recv", "src")
    chosen.recv(listed, peer, _checked(tag, "recv"), False, timeout)
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
    """Like `send`, at once; `tensor` must not be changed before the returned work is over."""
    chosen = resolve(group)
    if chosen is None:
        return None
    peer = peer_rank(chosen, dst, group_dst, "isend", "dst")
    return chosen.send(as_list(tensor, "isend"), peer, _checked(tag, "isend"), True, timeout)


@eager
def irecv(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Like `recv`, at once; when the returned work is over, its `source_rank()` is the group rank it came from."""
    chosen = resolve(group)
    if chosen is None:
        return None
    anyone = src is None and group_src is None
    peer = ANY_SOURCE if anyone else peer_rank(chosen, src, group_src, "irecv", "src")
    return chosen.recv(as_list(tensor, "irecv"), peer, _checked(tag, "irecv"), True, timeout)


class P2POp:
    """A send or a receive for `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv`.
        tensor: what is sent or received.
        peer, group_peer: the other rank, of the default group or of `group`; one of the two.
        group: the default group if None.
        tag: as for `send`.
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
            raise ValueError(f"P2POp: op is {op!r}; it must be paceline.isend or paceline.irecv")
        self.op = op
        self.tensor = tensor
        self._count = sum(each.numel() for each in as_list(tensor, "P2POp"))
        self.group = group
        self.tag = _checked(tag, "P2POp")
        self.peer = peer
        self.group_peer = group_peer
        chosen = resolve(group)
        if chosen is not None:
            self.group_peer = peer_rank(chosen, peer, group_peer, "P2POp", "peer")
            self.peer = chosen.ranks[self.group_peer]

    def __repr__(self) -> str:
        name = "isend" if self.op is isend else "irecv"
        return f"P2POp({name}, peer={self.peer}, tag={self.tag}, {self._count} elements)"


@eager
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Starts all of the sends and receives; the order of sends among receives does not matter.

    Returns:
        Their works, in the order of the list, without those of groups that this rank is not in.

    Raises:
        ValueError: the list is empty.
        TypeError: it has something else than `P2POp`.
    """
    if not p2p_op_list:
        raise ValueError("batch_isend_irecv: the list is empty; it must have at least one P2POp")
    for each in p2p_op_list:
        if not isinstance(each, P2POp):
            raise TypeError(f"batch_isend_irecv: the list has a {type(each).__name__}; it must have P2POp only")
    works = [
        isend(each.tensor, group=each.group, tag=each.tag, group_dst=each.group_peer)
        if each.op is isend
        else irecv(each.tensor, group=each.group, tag=each.tag, group_src=each.group_peer)
        for each in p2p_op_list
    ]
    return [work for work in works if work is not None]


def peer_rank(group: ProcessGroup, rank: int | None, group_rank: int | None, call: str, name: str) -> int:
    """The group rank of the other side.

    Raises:
        ValueError: it is this rank, or `root_rank` raises it.
    """
    peer = root_rank(group, rank, group_rank, call, name)
    if peer == group.rank():
        raise ValueError(
            f"{call}: {name} is rank {group.ranks[peer]}, this one; a rank sends nothing to itself, use tensor.copy_()"
        )
    return peer


def receive_from_any(group: ProcessGroup, tensors: list[torch.Tensor], tag: int, timeout: Timeout | None) -> int:
    """Receives what comes first; the group rank it came from."""
    work = group.recv(tensors, ANY_SOURCE, tag, True, timeout)
    assert work is not None
    work.wait()
    return work.source_rank()


def _checked(tag: int, call: str) -> int:
    if tag < 0:
        raise ValueError(f"{call}: tag is {tag}; it must be 0 or more")
    return tag
