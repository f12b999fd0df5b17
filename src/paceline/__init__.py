"""Paceline: distributed data-parallel training for PyTorch. `import paceline as dist`.

This file contains only re-exports. Names are loaded on first use, so that `paceline run` starts without importing
torch; `__init__.pyi` lists the same names for type checkers, and a test compares the two lists.
"""

from __future__ import annotations

import sys
from importlib import import_module
from os.path import exists

if sys.platform != "linux":
    raise ImportError(
        f"Paceline runs on Linux only, and this is {sys.platform}: its core needs Linux's shared memory and futexes. "
        "On Windows use it in WSL 2, and on macOS in a Linux container."
    )

_PUBLIC = {
    # process groups
    "paceline.comm.group.init": ("default_pg_timeout", "destroy_process_group", "init_process_group", "new_group"),
    "paceline.comm.group.default": (
        "Backend",
        "GroupMember",
        "get_backend",
        "get_backend_config",
        "get_default_backend_for_device",
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_pg_count",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "is_available",
        "is_backend_available",
        "is_gloo_available",
        "is_initialized",
        "is_mpi_available",
        "is_nccl_available",
        "is_torchelastic_launched",
        "is_ucc_available",
        "is_xccl_available",
        "supports_complex",
    ),
    "paceline.comm.group.process_group": ("ProcessGroup",),
    "paceline.comm.rendezvous.rendezvous": ("register_rendezvous_handler",),
    # stores
    "paceline.comm.store.store": ("HashStore", "PrefixStore", "Store"),
    "paceline.comm.store.file_store": ("FileStore",),
    "paceline.comm.store.tcp_store": ("TCPStore",),
    # collectives
    "paceline.comm.group.host_memory": ("empty_shared",),
    "paceline.comm.group.collectives.collectives": (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "explain",
        "gather",
        "monitored_barrier",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
    ),
    "paceline.comm.group.collectives.coalesced": (
        "all_gather_coalesced",
        "all_gather_into_tensor_coalesced",
        "all_reduce_coalesced",
        "broadcast_coalesced",
        "reduce_scatter_coalesced",
        "reduce_scatter_tensor_coalesced",
    ),
    "paceline.comm.group.debugger": ("breakpoint",),
    "paceline.comm.group.collectives.multigpu": (
        "all_gather_multigpu",
        "all_reduce_multigpu",
        "broadcast_multigpu",
        "reduce_multigpu",
        "reduce_scatter_multigpu",
    ),
    "paceline.comm.group.collectives.object_collectives": (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    ),
    "paceline.comm.group.collectives.persistent": (
        "all_gather_init",
        "all_gather_into_tensor_init",
        "all_reduce_init",
        "all_to_all_init",
        "all_to_all_single_init",
        "barrier_init",
        "broadcast_init",
        "gather_init",
        "PersistentCall",
        "recv_init",
        "reduce_init",
        "reduce_scatter_init",
        "reduce_scatter_tensor_init",
        "scatter_init",
        "send_init",
    ),
    "paceline.comm.group.collectives.point_to_point": ("P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"),
    "paceline.comm.engine.channel": ("PremulSum", "ReduceOp", "reduce_op"),
    "paceline.comm.group.subgroups": (
        "DeviceMesh",
        "init_device_mesh",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
    ),
    "paceline.comm.group.compression": ("Wire",),
    "paceline.comm.group.work": ("Work",),
    # torch's names with the same meaning in Paceline
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
    "paceline.train.checkpoint.manager": ("CheckpointManager",),
    "paceline.train.checkpoint.load": ("load",),
    "paceline.train.checkpoint.captured_state": ("RandomState",),
    "paceline.train.checkpoint.save": ("save",),
    # data-parallel training and data loading
    "paceline.train.data.sampler": ("DistributedEvalSampler", "DistributedSampler", "mean_over_samples"),
    "paceline.train.data.loader": ("StatefulLoader",),
    "paceline.train.ddp.comm_hook": ("GradBucket",),
    "paceline.train.data_parallel": ("DataParallel", "data_parallel"),
    "paceline.train.ddp.distributed_data_parallel": ("DistributedDataParallel", "DistributedDataParallelCPU"),
    "paceline.train.ddp.optimizer_in_backward": ("apply_optimizer_in_backward",),
    "paceline.train.checks.replica_check": ("check_replicas",),
    "paceline.train.lion": ("Lion",),
    "paceline.train.diloco.diloco": ("DiLoCo", "LocalSGD"),
    "paceline.train.shared_model.shared_model_optimizer": ("SharedModelOptimizer",),
    "paceline.train.pipeline.pipeline": ("Pipeline",),
    "paceline.train.divided_gradients": ("clip_grad_norm_", "GradScaler"),
    "paceline.train.tensor.parallelize": (
        "ColwiseParallel",
        "parallelize_module",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
    ),
    "paceline.train.join": ("Join", "Joinable", "JoinHook"),
    "paceline.train.sync_batch_norm": ("SyncBatchNorm", "convert_sync_batchnorm"),
    "paceline.train.elastic.agreement": ("ViewChange",),
    "paceline.train.elastic.worker.elastic_state": ("ElasticState",),
    "paceline.train.elastic.worker.vote": ("DivergenceError",),
    "paceline.train.logical_shards.shard_loader": ("ShardLoader",),
    "paceline.train.logical_shards.logical_shards": ("LogicalShards",),
    "paceline.train.zero.zero_redundancy_optimizer": ("ZeroRedundancyOptimizer",),
    # logging
    "paceline.comm.record.log": ("log", "log_to", "MlflowLog", "TensorBoardLog", "WandbLog"),
    "paceline.comm.record.spans": ("span",),
    # launcher
    "paceline.operate.launch.spawn": ("notebook_launch", "spawn"),
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
_MODULES = ("functional", "group")  # `group` provides group.WORLD
__all__ = sorted([*_MODULE_OF, *_MODULES])


def __getattr__(name: str) -> object:
    if name in _MODULES or name == "parallel":  # programs use paceline.parallel.hooks without a separate import
        return import_module(f"paceline.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}{_suggestion(name)}")
    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


_SHORT_NAMES = {"DDP": "DistributedDataParallel", "ZeRO": "ZeroRedundancyOptimizer", "init": "init_process_group"}


def _suggestion(name: str) -> str:
    """Returns a suggestion to append to the error message for a missing name, or "" if there is none.

    `from paceline import linux` calls this function before importing the submodule, so the function must be fast.
    """
    module = f"{__path__[0]}/{name}"
    if name.startswith("_") or exists(module) or exists(f"{module}.py"):
        return ""
    from difflib import get_close_matches

    names = {public.lower().replace("_", ""): public for public in __all__}
    near = get_close_matches(name.lower().replace("_", ""), names, n=1, cutoff=0.75)
    meant = _SHORT_NAMES.get(name) or (names[near[0]] if near else None)
    return f"; did you mean paceline.{meant}?" if meant else ""


def __dir__() -> list[str]:
    return __all__
