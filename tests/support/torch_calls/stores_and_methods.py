"""Stores, errors, and the methods of a group that take option objects."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from torch_calls.case import case, tensor


@case
def errors_are_torchs(d: Any, r: int, n: int) -> object:
    store = d.HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    try:
        store.get("never")
    except torch.distributed.DistStoreError as error:
        return isinstance(error, d.DistError)
    return None


@case
def stores(d: Any, r: int, n: int) -> object:
    store = d.HashStore()
    store.set("a", "1")
    results: list[object] = [store.get("a"), store.add("n", 2), store.check(["a"]), store.delete_key("a")]
    results += [store.compare_set("c", "", "new"), store.compare_set("c", "new", "newer"), store.num_keys() >= 2]
    store.append("c", "!")
    store.multi_set(["x", "y"], ["1", "2"])
    results += [store.multi_get(["x", "y"]), store.get("c"), store.has_extended_api()]
    store.wait(["x"])
    store.wait(["x"], timedelta(seconds=1))
    store.queue_push("q", "first")
    results += [store.queue_len("q"), store.queue_pop("q")]
    part = d.PrefixStore("p", store)
    part.set("k", "v")
    results += [part.get("k"), store.get("p/k"), part.underlying_store is not None]
    store.set_timeout(timedelta(seconds=3))
    return [*results, store.timeout, store.clone().get("y")]


@case
def a_store_over_tcp(d: Any, r: int, n: int) -> object:
    store = d.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5), wait_for_workers=False)
    other = d.TCPStore(
        host_name="127.0.0.1",
        port=store.port,
        world_size=None,
        is_master=False,
        timeout=timedelta(seconds=5),
    )
    store.set("a", b"bytes")
    return [other.get("a"), store.host, store.port == other.port, store.timeout]


@case
def methods_of_the_group(d: Any, r: int, n: int) -> object:
    pg, options = d.group.WORLD, torch.distributed
    a, outputs = tensor(r, 4), [torch.empty(4) for _ in range(n)]
    results: list[object] = [pg.rank(), pg.size()]
    pg.allreduce(a).wait()
    pg.allreduce([a]).wait()
    pg.allreduce([a], options.AllreduceOptions()).wait()
    pg.allreduce(a, options.ReduceOp.MAX).wait()
    pg.allreduce([a], op=options.ReduceOp.SUM).wait()
    chosen = options.AllreduceOptions()
    chosen.reduceOp, chosen.timeout = options.ReduceOp.MAX, timedelta(seconds=30)
    results.append(pg.allreduce([a], chosen).get_future().wait())
    pg.allreduce_coalesced([a, a.clone()]).wait()
    pg.broadcast(a, 0).wait()
    pg.broadcast(a, root=1).wait()
    chosen = options.BroadcastOptions()
    chosen.rootRank = 1
    pg.broadcast([a], chosen).wait()
    pg.broadcast([a]).wait()
    pg.reduce(a.clone(), 0).wait()
    chosen = options.ReduceOptions()
    chosen.rootRank = 1
    pg.reduce([a.clone()], chosen).wait()
    pg.broadcast(a, 1).wait()
    pg.allgather(outputs, a).wait()
    pg.allgather([outputs], [a]).wait()
    pg.allgather([outputs], [a], torch._C._distributed_c10d.AllgatherOptions()).wait()
    chosen = options.GatherOptions()
    chosen.rootRank = 0
    pg.gather([outputs] if r == 0 else [], [a], chosen).wait()
    pg.gather(outputs if r == 0 else [], a, 0).wait()
    chosen = options.ScatterOptions()
    chosen.rootRank = 0
    pg.scatter([a], [[each.clone() for each in outputs]] if r == 0 else [], chosen).wait()
    pg.scatter(a, [each.clone() for each in outputs] if r == 0 else [], 0).wait()
    pg.reduce_scatter([a], [[each.clone() for each in outputs]]).wait()
    pg.reduce_scatter(a, [each.clone() for each in outputs]).wait()
    pg.reduce_scatter([a], [[each.clone() for each in outputs]], options.ReduceScatterOptions()).wait()
    pg._allgather_base(whole := torch.empty(8), a).wait()
    pg._reduce_scatter_base(a, whole, options.ReduceScatterOptions()).wait()
    pg.alltoall_base(a, tensor(r, 4), [], []).wait()
    pg.alltoall_base(a, tensor(r, 4), [2, 2], [2, 2], options.AllToAllOptions()).wait()
    pg.barrier().wait()
    pg.barrier(options.BarrierOptions()).wait()
    pg.barrier(timeout=timedelta(seconds=30)).wait()
    pg.monitored_barrier(timedelta(seconds=30), False)
    works = [pg.recv([other := torch.empty(4)], 1 - r, 3), pg.send([a], 1 - r, 3)]
    for work in works:
        work.wait()
    return [*results, a, outputs, whole, other]
