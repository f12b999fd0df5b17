"""Paceline: distributed data-parallel training for PyTorch. `import paceline as dist`.

This file only re-exports. Names are loaded on first use, so that `paceline run` starts without importing torch;
`__init__.pyi` beside it spells the same list out for type checkers, and a test holds the two together.
"""

from __future__ import annotations

from importlib import import_module

_PUBLIC = {
    # process groups
    "paceline.group.default": (
        "GroupMember",
        "destroy_process_group",
        "get_backend",
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "init_process_group",
        "is_available",
        "is_initialized",
        "new_group",
    ),
    "paceline.group.process_group": ("ProcessGroup",),
    # stores
    "paceline.store.base": ("Store",),
    "paceline.store.file": ("FileStore",),
    "paceline.store.hash": ("HashStore",),
    "paceline.store.prefix": ("PrefixStore",),
    "paceline.store.tcp": ("TCPStore",),
    # collectives
    "paceline.engine.shared": ("empty_shared",),
    "paceline.group.collectives": (
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    ),
    "paceline.group.reduce_op": ("PremulSum", "ReduceOp"),
    "paceline.group.work": ("Work",),
    # data parallel modules and data
    "paceline.data.evaluation": ("DistributedEvalSampler", "mean_over_samples"),
    "paceline.data.loader": ("StatefulLoader",),
    "paceline.data.sampler": ("DistributedSampler",),
    "paceline.parallel.ddp": ("DistributedDataParallel", "DistributedDataParallelCPU"),
    "paceline.parallel.sharded.loader": ("ShardLoader",),
    "paceline.parallel.sharded.logical": ("LogicalShards",),
    "paceline.parallel.zero.optimizer": ("ZeroRedundancyOptimizer",),
    # launcher
    "paceline.launch.spawn": ("spawn",),
    # errors
    "paceline.errors": (
        "AuthenticationError",
        "CollectiveError",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "PacelineError",
        "PeerLostError",
        "RendezvousError",
        "RendezvousTimeoutError",
        "StoreConnectionError",
        "StoreError",
        "StoreTimeoutError",
        "WorkerError",
    ),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
