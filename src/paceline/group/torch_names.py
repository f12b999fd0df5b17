"""Names that torch.distributed defines and that mean the same in Paceline."""

from __future__ import annotations

from torch._C import _DistBackendError as DistBackendError
from torch._C import _DistError as DistError
from torch._C import _DistNetworkError as DistNetworkError
from torch._C import _DistStoreError as DistStoreError
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    DebugLevel,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "DebugLevel",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "GatherOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
]
