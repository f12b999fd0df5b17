"""The public names of `paceline.horovod`, under Horovod's module names. Rank 0 reports the first import.

May use: `paceline.horovod`. Start reading at `_MODULES`, the table of replaced Horovod modules.
"""

from __future__ import annotations

import os
import sys

from paceline.interop import horovod
from paceline.interop.horovod import collectives, optimizer
from paceline.train import sync_batch_norm

from ..common.util import check_extension

_REPORTED = "PACELINE_COMPAT_REPORTED"  # set after the report; inherited by the processes that the script starts
_MODULES = {
    "compression": collectives,
    "functions": collectives,
    "mpi_ops": horovod,
    "optimizer": optimizer,
    "sync_batch_norm": sync_batch_norm,
}

if os.environ.get("RANK", "0") == "0" and _REPORTED not in os.environ:
    os.environ[_REPORTED] = "1"
    print("paceline: --compat horovod: `import horovod.torch` is paceline.horovod", file=sys.stderr, flush=True)

__all__ = ["check_extension", *horovod.__all__]
globals().update({name: getattr(horovod, name) for name in horovod.__all__}, **_MODULES)
sys.modules.update({f"{__name__}.{name}": module for name, module in _MODULES.items()})


def __getattr__(name: str) -> object:
    value: object = getattr(horovod, name)
    return value
