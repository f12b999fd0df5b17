"""Has what `paceline.interop.horovod` has under Horovod's names, its modules included, and says so on rank 0.

May use: `paceline.interop.horovod`. Start reading at `_MODULES`, which says what stands for which module.
"""

from __future__ import annotations

import os
import sys

import paceline.interop.horovod
from paceline.interop.horovod import compression, optimizer, state
from paceline.train import sync_batch_norm

from ..common.util import check_extension

_TOLD = "PACELINE_COMPAT_TOLD"  # also reaches the processes that the script starts
_MODULES = {
    "compression": compression,
    "functions": state,
    "mpi_ops": paceline.interop.horovod,
    "optimizer": optimizer,
    "sync_batch_norm": sync_batch_norm,
}

if os.environ.get("RANK", "0") == "0" and _TOLD not in os.environ:
    os.environ[_TOLD] = "1"
    print("paceline: --compat horovod: `import horovod.torch` is paceline.interop.horovod", file=sys.stderr, flush=True)

__all__ = ["check_extension", *paceline.interop.horovod.__all__]
globals().update(
    {name: getattr(paceline.interop.horovod, name) for name in paceline.interop.horovod.__all__}, **_MODULES
)
sys.modules.update({f"{__name__}.{name}": module for name, module in _MODULES.items()})


def __getattr__(name: str) -> object:
    value: object = getattr(paceline.interop.horovod, name)
    return value
