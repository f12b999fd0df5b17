"""Paceline: distributed data-parallel training for PyTorch. `import paceline as dist`.

This file only re-exports. Names are loaded on first use, so that `paceline run` starts without importing torch;
`__init__.pyi` beside it spells the same list out for type checkers, and a test holds the two together.
"""

from __future__ import annotations

import sys
from importlib import import_module

if sys.platform != "linux":
    raise ImportError(
        f"Paceline runs on Linux only, and this is {sys.platform}: its core needs Linux's shared memory and futexes. "
        "On Windows use it in WSL 2, and on macOS in a Linux container."
    )

_PUBLIC = {
    # process groups
    "paceline.group.default": ("GroupMember",),
    "paceline.group.init": ("default_pg_timeout", "destroy_process_group", "init_process_group", "new_group"),
    "paceline.group.queries": (
        "get_backend",
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_pg_count",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "is_available",
        "is_initialized",
    ),
    "paceline.group.backends": (
        "Backend",
        "get_backend_config",
        "get_default_backend_for_device",
        "is_backend_available",
        "is_gloo_available",
        "is_mpi_available",
        "is_nccl_available",
        "is_torchelastic_launched",
        "is_ucc_available",
        "is_xccl_available",
        "supports_complex",
    ),
    "paceline.group.process_group": ("ProcessGroup",),
    "paceline.rendezvous.handlers": ("register_rendezvous_handler",),
    # stores
    "paceline.store.base": ("Store",),
    "paceline.store.file": ("FileStore",),
    "paceline.store.hash": ("HashStore",),
    "paceline.store.prefix": ("PrefixStore",),
    "paceline.store.tcp": ("TCPStore",),
    # collectives
    "paceline.engine.native.shared": ("empty_shared",),
    "paceline.group.barriers": ("barrier", "monitored_barrier"),
    "paceline.group.coalesced": (
        "all_gather_coalesced",
        "all_gather_into_tensor_coalesced",
        "all_reduce_coalesced",
        "broadcast_coalesced",
        "reduce_scatter_coalesced",
        "reduce_scatter_tensor_coalesced",
    ),
    "paceline.group.collectives": (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "explain",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    ),
    "paceline.group.debugging": ("breakpoint",),
    "paceline.group.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "paceline.group.multigpu": (
        "all_gather_multigpu",
        "all_reduce_multigpu",
        "broadcast_multigpu",
        "reduce_multigpu",
        "reduce_scatter_multigpu",
    ),
    "paceline.group.objects.messages": ("recv_object_list", "send_object_list"),
    "paceline.group.objects.collectives": (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
    ),
    "paceline.group.persistent": ("PersistentCall",),
    "paceline.group.persistent_calls": (
        "all_gather_init",
        "all_gather_into_tensor_init",
        "all_reduce_init",
        "all_to_all_init",
        "all_to_all_single_init",
        "barrier_init",
        "reduce_scatter_init",
        "reduce_scatter_tensor_init",
    ),
    "paceline.group.persistent_rooted": (
        "broadcast_init",
        "gather_init",
        "recv_init",
        "reduce_init",
        "scatter_init",
        "send_init",
    ),
    "paceline.group.point_to_point": ("P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"),
    "paceline.group.reduce_op": ("PremulSum", "ReduceOp", "reduce_op"),
    "paceline.group.rooted": ("broadcast", "gather", "reduce", "scatter"),
    "paceline.group.subgroups": ("new_subgroups", "new_subgroups_by_enumeration", "split_group"),
    "paceline.group.wire": ("Wire",),
    "paceline.group.work": ("Work",),
    # names of torch's that mean the same here
    "torch.distributed": (
        "DebugLevel",
        "DistBackendError",
        "DistError",
        "DistNetworkError",
        "DistStoreError",
        "get_debug_level",
        "set_debug_level",
        "set_debug_level_from_env",
    ),
    "torch.distributed.distributed_c10d": (
        "AllToAllOptions",
        "AllgatherOptions",
        "AllreduceCoalescedOptions",
        "AllreduceOptions",
        "BarrierOptions",
        "BroadcastOptions",
        "GatherOptions",
        "ReduceOptions",
        "ReduceScatterOptions",
        "ScatterOptions",
    ),
    # checkpoints
    "paceline.checkpoint.in_training": ("CheckpointManager",),
    "paceline.checkpoint.loading": ("load",),
    "paceline.checkpoint.random_state": ("RandomState",),
    "paceline.checkpoint.saving": ("save",),
    # data parallel modules and data
    "paceline.data.evaluation": ("DistributedEvalSampler", "mean_over_samples"),
    "paceline.data.loader": ("StatefulLoader",),
    "paceline.data.sampler": ("DistributedSampler",),
    "paceline.parallel.ddp.hook": ("GradBucket",),
    "paceline.parallel.data_parallel": ("DataParallel", "data_parallel"),
    "paceline.parallel.ddp.module": ("DistributedDataParallel", "DistributedDataParallelCPU"),
    "paceline.parallel.ddp.fused_step": ("apply_optimizer_in_backward",),
    "paceline.parallel.health.replicas": ("check_replicas",),
    "paceline.parallel.lion": ("Lion",),
    "paceline.parallel.local.diloco": ("DiLoCo",),
    "paceline.parallel.local.local_sgd": ("LocalSGD",),
    "paceline.parallel.one_copy.optimizer": ("SharedModelOptimizer",),
    "paceline.parallel.pipeline.module": ("Pipeline",),
    "paceline.parallel.tensor.clipping": ("clip_grad_norm_",),
    "paceline.parallel.tensor.parallelize": ("parallelize_module",),
    "paceline.parallel.tensor.styles": (
        "ColwiseParallel",
        "PrepareModuleInput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
    ),
    "paceline.parallel.join": ("Join", "Joinable", "JoinHook"),
    "paceline.parallel.sync_batch_norm": ("SyncBatchNorm", "convert_sync_batchnorm"),
    "paceline.elastic.dealings": ("ViewChange",),
    "paceline.elastic.state": ("ElasticState",),
    "paceline.elastic.vote": ("DivergenceError",),
    "paceline.parallel.sharded.loader": ("ShardLoader",),
    "paceline.parallel.sharded.logical": ("LogicalShards",),
    "paceline.parallel.zero.grad_scaler": ("GradScaler",),
    "paceline.parallel.zero.optimizer": ("ZeroRedundancyOptimizer",),
    # what a job records
    "paceline.record.sinks": ("MlflowLog", "TensorBoardLog", "WandbLog", "log_to"),
    "paceline.record.spans": ("span",),
    "paceline.record.values": ("log",),
    # launcher
    "paceline.launch.spawn": ("notebook_launch", "spawn"),
    # errors
    "paceline.errors": (
        "AuthenticationError",
        "CheckpointDamagedError",
        "CheckpointError",
        "CollectiveError",
        "CollectiveMismatchError",
        "CollectiveObjectError",
        "CollectiveTimeoutError",
        "GroupAbortedError",
        "OutOfDescriptorsError",
        "PacelineError",
        "PeerLostError",
        "RendezvousError",
        "RendezvousTimeoutError",
        "ReplicasDifferError",
        "StoreConnectionError",
        "StoreError",
        "StoreQueueEmptyError",
        "StoreTimeoutError",
        "WorkerError",
    ),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__version__ = "0.1.0"
_MODULES = ("functional", "group")  # group for group.WORLD
__all__ = sorted([*_MODULE_OF, *_MODULES])


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"paceline.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
