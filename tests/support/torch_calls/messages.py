"""Messages from one rank to another, and collectives of objects."""

from __future__ import annotations

from typing import Any

import torch

from torch_calls.case import case, tensor


@case
def point_to_point(d: Any, r: int, n: int) -> object:
    t = tensor(r, 3)
    if r == 0:
        d.send(t, 1)
        d.send(t, dst=1, tag=5)
        d.isend(t, 1, tag=6).wait()
        d.isend(t, 1).wait()
        return None
    return [d.recv(t), d.recv(t, src=0, tag=5), d.irecv(t, 0, tag=6).wait(), d.recv(t, src=None), t]


@case
def irecv_from_anybody(d: Any, r: int, n: int) -> object:
    if r == 0:
        return d.isend(tensor(r, 3), 1).wait()
    work = d.irecv(torch.empty(3))
    work.wait()
    return work._source_rank()


@case
def source_rank(d: Any, r: int, n: int) -> object:
    if r == 0:
        return d.isend(tensor(r, 3), 1).wait()
    work = d.irecv(torch.empty(3))
    work.wait()
    return work.source_rank()


@case
def batches(d: Any, r: int, n: int) -> object:
    t, other = tensor(r, 3), torch.empty(3)
    ops = [d.P2POp(d.isend, t, 1 - r), d.P2POp(d.irecv, other, 1 - r, None, 0)]
    for work in d.batch_isend_irecv(ops):
        work.wait()
    ops = [d.P2POp(op=d.irecv, tensor=other, group_peer=1 - r), d.P2POp(d.isend, t, peer=1 - r, group=d.group.WORLD)]
    for work in d.batch_isend_irecv(ops):
        work.wait()
    return [other, ops[0].peer, ops[1].group_peer, ops[0].tag]


@case
def objects(d: Any, r: int, n: int) -> object:
    d.all_gather_object(everyone := [None] * n, {"rank": r, "text": "x" * r, "list": [1.5, None, (2, r)]})
    d.gather_object(r, gathered := [None] * n if r == 0 else None, dst=0)
    d.broadcast_object_list(sent := [r, "a", None], src=1)
    d.broadcast_object_list(sent_to := [r], 0, None, torch.device("cpu"))
    d.scatter_object_list(received := [None], [[1], {2: 3}] if r == 0 else None, src=0)
    return [everyone, gathered, sent, sent_to, received]


@case
def object_messages(d: Any, r: int, n: int) -> object:
    if r == 0:
        d.send_object_list(["a", 1], 1)
        d.send_object_list([2], dst=1, device=torch.device("cpu"))
        return None
    got = [None, None]
    return [d.recv_object_list(got, 0), got, d.recv_object_list(got[:1], src=0)]
