"""Horovod's interface for PyTorch over Paceline: `import paceline.horovod as hvd`.

This is a thin layer. May use: `group`, `functional` and `parallel`, and `launch` for `run`. `ranks.py` has `init` and
the ranks, `calls.py` and `varying.py` the collectives, `negotiation.py` makes them and checks that the ranks agree,
`handles.py` has the asynchronous ones' handles, `optimizer.py` `DistributedOptimizer`, whose gradients `gradients.py`
averages; `stand_in/` is what `paceline run --compat horovod` puts on the path. Start reading at `calls.py`;
docs/migrating.md says what differs from Horovod.
"""

from __future__ import annotations

from typing import NoReturn

from paceline.errors import CollectiveError as HorovodInternalError
from paceline.horovod.calls import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    join,
)
from paceline.horovod.compression import Compression
from paceline.horovod.handles import poll, synchronize
from paceline.horovod.optimizer import DistributedOptimizer
from paceline.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from paceline.horovod.ranks import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
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
    rocm_built,
    shutdown,
    size,
)
from paceline.horovod.reductions import Adasum, Average, Max, Min, Product, Sum
from paceline.horovod.running import run
from paceline.horovod.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from paceline.horovod.varying import (
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
from paceline.parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]

ABSENT = {
    "elastic": "Horovod's elastic state goes back to its last commit when a worker dies; paceline.ElasticState loses "
    "no step and has another form (docs/elastic.md)",
    "start_timeline": "`paceline trace` writes the timeline of any job after it has ended (docs/observe.md)",
    "stop_timeline": "`paceline trace` writes the timeline of any job after it has ended (docs/observe.md)",
}


def __getattr__(name: str) -> NoReturn:
    reason = f": {ABSENT[name]}" if name in ABSENT else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{reason}")
