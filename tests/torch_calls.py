"""Calls of torch.distributed in every form of their arguments that is legal, for `tests/ranks/test_torch_calls.py`.

A case is a function of a module (`torch.distributed` or `paceline`), this rank and the number of ranks, which is 2. It
returns what the call gave: tensors, numbers, names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy
import torch

Case = Callable[[Any, int, int], object]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def tensor(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + rank)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)


def sparse(rank: int, values: int = 3, *, coalesced: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    indices = (torch.arange(values) * (rank + 1) + (0 if coalesced else 1)) % 5
    made = torch.sparse_coo_tensor(indices[None], tensor(rank, values, 2, dtype=dtype), (5, 2), check_invariants=False)
    return made.coalesce() if coalesced else made


def plain(result: torch.Tensor) -> list[object]:
    """A sparse tensor as tensors that can be compared."""
    return [result.is_coalesced(), result.layout, result.coalesce().indices(), result.coalesce().values()]


SHAPES = {
    "0-dim": (),
    "empty": (0,),
    "no rows": (0, 3),
    "matrix": (3, 4),
}
KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    **{name: lambda r, shape=shape: tensor(r, *shape) for name, shape in SHAPES.items()},
    "transposed": lambda r: tensor(r, 3, 4).t(),
    "requires_grad": lambda r: tensor(r, 4).requires_grad_(),
    "computed": lambda r: tensor(r, 4).requires_grad_() * 2,
    "parameter": lambda r: torch.nn.Parameter(tensor(r, 4)),
    "complex": lambda r: torch.complex(tensor(r, 4), tensor(r + 9, 4)),
    "int64": lambda r: tensor(r, 4, dtype=torch.int64),
    "uint8": lambda r: tensor(r, 4, dtype=torch.uint8),
    "float16": lambda r: tensor(r, 4, dtype=torch.float16),
    "bool": lambda r: tensor(r, 4) > 50,
}


def forms() -> Iterator[tuple[str, Case]]:
    for name, make in KINDS.items():

        def all_reduce(d: Any, r: int, n: int, make: Any = make) -> object:
            t = make(r).detach() if "bool" not in str(make(r).dtype) else make(r).to(torch.uint8)
            assert d.all_reduce(t) is None
            return t

        def broadcast(d: Any, r: int, n: int, make: Any = make) -> object:
            with torch.no_grad():
                d.broadcast(t := make(r), 1)
            return t.detach()

        def all_gather(d: Any, r: int, n: int, make: Any = make) -> object:
            outputs = [torch.empty_like(make(r).detach(), memory_format=torch.contiguous_format) for _ in range(n)]
            d.all_gather(outputs, make(r).detach())
            return outputs

        def gather_and_scatter(d: Any, r: int, n: int, make: Any = make) -> object:
            t = make(r).detach().contiguous()
            lists = [torch.empty_like(t) for _ in range(n)] if r == 0 else []
            d.gather(t, lists, dst=0)
            d.scatter(t, [each.clone() for each in lists][::-1], src=0)
            return [t, *lists]

        def send(d: Any, r: int, n: int, make: Any = make) -> object:
            t = make(r).detach().contiguous()
            d.send(t, 1) if r == 0 else d.recv(t, 0)
            return t

        for function in (all_reduce, broadcast, all_gather, gather_and_scatter, send):
            yield f"{function.__name__}: {name}", function


CASES.update(forms())


@case
def async_op_true(d: Any, r: int, n: int) -> object:
    t = tensor(r, 4)
    work = d.all_reduce(t, async_op=True)
    assert work.wait() is True
    assert work.is_completed() and work.is_success()
    return [t, work.result()]


@case
def every_collective_with_async_op(d: Any, r: int, n: int) -> object:
    def done(work: Any) -> None:
        assert work.wait()

    a, outputs = tensor(r, 4), [torch.empty(4) for _ in range(n)]
    done(d.broadcast(a, src=0, async_op=True))
    done(d.reduce(a.clone(), dst=0, async_op=True))
    done(d.all_gather(outputs, a, async_op=True))
    done(d.gather(a, outputs if r == 0 else None, dst=0, async_op=True))
    done(d.scatter(a, outputs if r == 0 else None, src=0, async_op=True))
    done(d.reduce_scatter(a, [each.clone() for each in outputs], async_op=True))
    done(d.all_to_all_single(whole := torch.empty(4), a, async_op=True))
    done(d.barrier(async_op=True))
    return [outputs if r == 0 else a, whole]


@case
def reductions(d: Any, r: int, n: int) -> object:
    results = []
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        d.all_reduce(t := tensor(r, 5, dtype=torch.int32), op=getattr(d.ReduceOp, name))
        results.append(t)
    for op in (d.ReduceOp.RedOpType.MAX, d.ReduceOp(d.ReduceOp.SUM), d.reduce_op.SUM):
        d.all_reduce(t := tensor(r, 5), op)
        results.append(t)
    return results


@case
def sparse_all_reduce(d: Any, r: int, n: int) -> object:
    results = []
    for t in (sparse(r), sparse(r, coalesced=False), sparse(r, 3 * r), sparse(r, dtype=torch.int64), sparse(r, 0)):
        d.all_reduce(t)
        results += plain(t)
    return results


@case
def sparse_all_reduce_async(d: Any, r: int, n: int) -> object:
    work = d.all_reduce(t := sparse(r, 2 + r), async_op=True)
    work.wait()
    return plain(t)


@case
def all_reduce_by_keywords(d: Any, r: int, n: int) -> object:
    d.all_reduce(tensor=(t := tensor(r, 3)), op=d.ReduceOp.MAX, group=None, async_op=False)
    d.all_reduce(t, d.ReduceOp.SUM, d.group.WORLD)
    d.all_reduce(t, group=d.GroupMember.WORLD)
    return t


@case
def ranks_of_other_types(d: Any, r: int, n: int) -> object:
    t = tensor(r, 3)
    d.broadcast(t, numpy.int64(1))
    d.broadcast(t, torch.tensor(1).item())
    d.reduce(t, dst=numpy.int32(0))  # what it leaves on the others is gloo's secret
    return t if r == 0 else None


@case
def group_src_and_group_dst(d: Any, r: int, n: int) -> object:
    t = tensor(r, 3)
    d.broadcast(t, group_src=1)
    d.reduce(t.clone(), group_dst=0)
    outputs = [torch.empty(3) for _ in range(n)]
    d.gather(t, outputs if r == 1 else None, group_dst=1)
    d.scatter(t, outputs if r == 1 else None, group_src=1)
    d.send(t, group_dst=1) if r == 0 else d.recv(t, group_src=0)
    return [t, outputs if r == 1 else None]


@case
def gather_and_scatter_without_a_root(d: Any, r: int, n: int) -> object:
    outputs = [torch.empty(3) for _ in range(n)]
    d.gather(tensor(r, 3), outputs if r == 0 else None)
    d.scatter(t := torch.empty(3), outputs if r == 0 else None)
    return t


@case
def gather_positionally(d: Any, r: int, n: int) -> object:
    outputs = [torch.empty(3) for _ in range(n)]
    d.gather(tensor(r, 3), outputs if r == 1 else None, 1, None, False)
    d.scatter(t := torch.empty(3), outputs if r == 1 else None, 1, None, False)
    return t


@case
def a_list_to_reduce(d: Any, r: int, n: int) -> object:
    d.reduce_scatter(t := torch.empty(3), [tensor(r, 3), tensor(r + 5, 3)])
    return t


@case
def all_gather_into_one(d: Any, r: int, n: int) -> object:
    d.all_gather_into_tensor(concatenated := torch.empty(6), tensor(r, 3))
    d.all_gather_single(single := torch.empty(6), tensor(r, 3))
    return [concatenated, single]


@case
def reduce_scatter_of_one(d: Any, r: int, n: int) -> object:
    d.reduce_scatter_tensor(a := torch.empty(3), tensor(r, 6))
    d.reduce_scatter_tensor(b := torch.empty(3), tensor(r, 6), op=d.ReduceOp.MAX)
    d.reduce_scatter_single(c := torch.empty(3), tensor(r, 6))
    return [a, b, c]


@case
def all_to_all_forms(d: Any, r: int, n: int) -> object:
    d.all_to_all_single(a := torch.empty(4), tensor(r, 4))
    d.all_to_all_single(b := torch.empty(4), tensor(r, 4), [], [])
    d.all_to_all_single(c := torch.empty(2 + 2 * r), tensor(r, 3), [1 + r] * 2, [1, 2])
    d.all_to_all_single(e := torch.empty(4, 2), tensor(r, 4, 2), output_split_sizes=None, input_split_sizes=None)
    return [a, b, c, e]


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
def coalesced(d: Any, r: int, n: int) -> object:
    tensors = [tensor(r, 3), tensor(r, 2)]
    d.all_reduce_coalesced(tensors)
    d.all_reduce_coalesced(tensors, op=d.ReduceOp.MAX, group=None, async_op=True).wait()
    return tensors


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


@case
def barriers(d: Any, r: int, n: int) -> object:
    d.monitored_barrier(timeout=5.5)
    d.monitored_barrier(None, timedelta(seconds=5), True)
    d.monitored_barrier(d.group.WORLD, wait_all_ranks=True)
    return [d.barrier(), d.barrier(d.group.WORLD, False, None), d.barrier(async_op=True).wait()]


@case
def groups_of_one(d: Any, r: int, n: int) -> object:
    groups = [d.new_group([rank]) for rank in range(n)]
    alone = groups[r]
    t = tensor(r, 4)
    d.all_reduce(t, group=alone)
    d.broadcast(t, r, group=alone)
    d.reduce(t, r, group=alone)
    d.all_gather(gathered := [torch.empty(4)], t, group=alone)
    d.gather(t, gathered, r, group=alone)
    d.scatter(t, gathered, r, group=alone)
    d.reduce_scatter(t, [tensor(r, 4)], group=alone)
    d.all_gather_into_tensor(t, tensor(r, 4), group=alone)
    d.all_to_all_single(t, tensor(r, 4), group=alone)
    d.all_gather_object(objects := [None], {"a": r}, group=alone)
    d.barrier(alone)
    d.barrier()
    return [t, gathered, objects, d.get_rank(alone), d.get_world_size(alone), d.get_process_group_ranks(alone)]


@case
def calls_of_a_rank_that_is_not_in_the_group(d: Any, r: int, n: int) -> object:
    groups = [d.new_group([rank]) for rank in range(n)]
    other, t = groups[1 - r], tensor(r, 4)
    results = [
        d.all_reduce(t, group=other),
        d.broadcast(t, 1 - r, group=other),
        d.all_gather([t], t, group=other),
        d.reduce(t, 1 - r, group=other),
        d.all_reduce(t, group=d.GroupMember.NON_GROUP_MEMBER, async_op=True),
        d.gather(t, None, 1 - r, group=other),
        d.scatter(t, None, 1 - r, group=other),
        d.barrier(other),
        d.get_rank(other),
        d.get_world_size(other),
        d.all_gather_object([None], r, group=other),
    ]
    return [*results, t]


@case
def new_groups(d: Any, r: int, n: int) -> object:
    results = []
    for arguments in (
        {},
        {"ranks": None},
        {"ranks": (0, 1)},
        {"ranks": range(2)},
        {"ranks": [0, 1], "timeout": timedelta(seconds=20), "backend": None, "pg_options": None},
        {"ranks": [0, 1], "use_local_synchronization": True, "group_desc": "both"},
        {"ranks": [0, 1], "timeout": timedelta(seconds=20), "device_id": None},
    ):
        group = d.new_group(**arguments)
        d.all_reduce(t := tensor(r, 2), group=group)
        results += [t, d.get_rank(group), d.get_process_group_ranks(group)]
        d.destroy_process_group(group)
    return results


@case
def subgroups(d: Any, r: int, n: int) -> object:
    mine, everyone = d.new_subgroups(1)
    also, _ = d.new_subgroups_by_enumeration([[0], [1]])
    whole, _ = d.new_subgroups(group_size=2, timeout=timedelta(seconds=20))
    return [d.get_world_size(mine), len(everyone), d.get_rank(also), d.get_rank(whole)]


@case
def questions(d: Any, r: int, n: int) -> object:
    world = d.group.WORLD
    return [
        d.get_rank(),
        d.get_rank(None),
        d.get_rank(group=world),
        d.get_world_size(),
        d.get_global_rank(world, r),
        d.get_group_rank(world, r),
        d.get_process_group_ranks(None),
        d.get_process_group_ranks(world),
        d.is_initialized(),
        d.is_available(),
        d.is_backend_available("gloo"),
        d.is_backend_available("GLOO"),
        d.is_backend_available("cpu:gloo"),
        d.is_backend_available("nothing"),
        d.is_torchelastic_launched(),
        d.is_ucc_available(),
        d.is_xccl_available(),
        d.get_debug_level() == torch.distributed.DebugLevel.OFF,
        d.get_node_local_rank(3) >= 0,
        str(d.Backend("GLOO")),
        d.Backend.GLOO,
        isinstance(d.get_backend(), str),
        isinstance(d.get_backend_config(), str),
        isinstance(d.get_default_backend_for_device("cpu"), str),
        d.get_pg_count() > 0,
        d.supports_complex(d.ReduceOp.SUM),
        d.supports_complex(d.ReduceOp.MAX),
        d.default_pg_timeout,
    ]


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
