"""Sends objects from one rank to another; `objects/collectives.py` says what an object is and what is raised."""

from __future__ import annotations

from typing import Any

import torch

from paceline.durations import Timeout
from paceline.group.default import Group, resolve
from paceline.group.eager import eager
from paceline.group.objects.collectives import require_cpu
from paceline.group.objects.wire import Incoming, Outgoing, announcement_for
from paceline.group.point_to_point import peer_rank, receive_from_any
from paceline.group.queries import get_global_rank

_TAG = 0


@eager
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    allow_pickle: bool = False,
    timeout: Timeout | None = None,
) -> None:
    """Sends the objects of `object_list`; the receiver's list must have the same length.

    `use_batch` has no effect. `timeout` limits each of the two or three messages that a call consists of.

    Raises:
        TypeError: an object cannot be sent; the receiver gets an error as well.
        ValueError: `device` is not the CPU; also as for `send`.
    """
    call = "send_object_list"
    chosen = resolve(group)
    if chosen is None:
        return
    require_cpu(device, call)
    peer = peer_rank(chosen, dst, group_dst, call, "dst")
    outgoing = Outgoing(chosen, call, object_list, "object_list[{}]", allow_pickle)
    chosen.send([outgoing.announcement], peer, _TAG, False, timeout)
    if outgoing.error is not None:
        raise outgoing.error
    for pieces in (outgoing.heads, [buffer for each in outgoing.buffers for buffer in each]):
        if pieces:
            chosen.send(pieces, peer, _TAG, False, timeout)


@eager
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    allow_pickle: bool = False,
    timeout: Timeout | None = None,
) -> int:
    """Receives objects into `object_list`, from any rank if no source is given.

    The arguments are those of `send_object_list`.

    Returns:
        The sender's rank in the default group; -1 on a rank that is not in the group.

    Raises:
        CollectiveObjectError: an object is a pickle, or malformed, or could not be sent.
        ValueError: `device` is not the CPU; also as for `recv`.
    """
    call = "recv_object_list"
    chosen = resolve(group)
    if chosen is None:
        return -1
    require_cpu(device, call)
    announcement = announcement_for(len(object_list))
    if src is None and group_src is None:
        peer = receive_from_any(chosen, [announcement], _TAG, timeout)
    else:
        peer = peer_rank(chosen, src, group_src, call, "src")
        chosen.recv([announcement], peer, _TAG, False, timeout)
    incoming = Incoming(chosen, call, peer, announcement)
    for rooms in (incoming.head_rooms, incoming.buffer_rooms):
        pieces = rooms()
        if pieces:
            chosen.recv(pieces, peer, _TAG, False, timeout)
    object_list[:] = incoming.objects(allow_pickle)
    return get_global_rank(chosen, peer)
