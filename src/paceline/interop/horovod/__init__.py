"""Horovod's PyTorch interface, implemented with Paceline: `import paceline.horovod as hvd`.

`call_queue.py` executes the calls from `collectives.py` and `uneven_collectives.py` and checks that they match across
ranks. `stand_in/` contains a package `horovod` with Horovod's module names; `paceline run --compat horovod` adds it to
the import path. docs/migrating.md lists the differences from Horovod.

May use: `group`, `functional`, `ddp`, and `launch` for `run`. Start reading at `basics.py` and `collectives.py`.
"""

from __future__ import annotations

from typing import NoReturn

from paceline.errors import CollectiveError as HorovodInternalError
from paceline.interop.horovod.basics import (
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    run,
    shutdown,
    size,
)
from paceline.interop.horovod.call_queue import poll, synchronize
from paceline.interop.horovod.collectives import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    join,
)
from paceline.interop.horovod.optimizer import DistributedOptimizer
from paceline.interop.horovod.uneven_collectives import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from paceline.train.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set",
    "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll", "rank", "reducescatter",
    "reducescatter_async", "remove_process_set", "rocm_built", "run", "shutdown", "size", "sparse_allreduce_async",
    "synchronize",
]  # fmt: skip

ABSENT = {
    "elastic": "Horovod's elastic state returns to its last commit when a worker dies; paceline.ElasticState loses no "
    "step and has a different interface (docs/elastic.md)",
    "start_timeline": "`paceline trace` writes the timeline of any job after it has ended (docs/observe.md)",
    "stop_timeline": "`paceline trace` writes the timeline of any job after it has ended (docs/observe.md)",
}


def __getattr__(name: str) -> NoReturn:
    reason = f": {ABSENT[name]}" if name in ABSENT else ""
    raise AttributeError(f"module 'paceline.horovod' has no attribute {name!r}{reason}")
