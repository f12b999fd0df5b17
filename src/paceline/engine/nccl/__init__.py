"""The nccl engine: CUDA tensors, by the NCCL library that torch brings or the system has.

May use what `engine` may. Start reading at `engine.py`. A call becomes a `plan.py` of NCCL calls, which a `line.py`
puts into a stream of its own; `watch.py` ends those that never would. `loader.py` finds NCCL and `functions.py` has its
functions, `communicator.py` calls them. `device.py` is all that knows CUDA.
"""

from __future__ import annotations

import torch

from paceline.engine.api import Meeting
from paceline.engine.nccl.device import CudaDevice
from paceline.engine.nccl.engine import NcclEngine
from paceline.engine.nccl.loader import LibraryMissingError, find


def missing_piece() -> str | None:
    """The first thing that the engine needs and this machine lacks, with the fix; None if it can be used."""
    if torch.version.cuda is None:
        return (
            f"this torch ({torch.__version__}) was built without CUDA; install one with it (pytorch.org, Get Started), "
            "or use backend='paceline' with CPU tensors"
        )
    if torch.cuda.device_count() == 0:
        return (
            "torch sees no GPU; look at nvidia-smi, at the driver, and at CUDA_VISIBLE_DEVICES, or use "
            "backend='paceline' with CPU tensors"
        )
    try:
        find()
    except LibraryMissingError as error:
        return str(error)
    return None


def start(meeting: Meeting) -> NcclEngine:
    """The engine, on every rank."""
    return NcclEngine(meeting, find(), CudaDevice)
