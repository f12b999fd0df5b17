"""The nccl engine: CUDA tensors, by the NCCL library that torch brings or the system has.

A call becomes NCCL calls (`plan.py`), which `call_stream.py` puts into a CUDA stream of its own. `watch.py` aborts
those that would never end. `loader.py` finds the library, `functions.py` declares its functions, and
`communicator.py` calls them. Only `device.py` knows CUDA.

May use: `engine/api.py`, `engine/failures.py`, `engine/introduction.py`, `store`. Start reading at `engine.py`.
"""

from __future__ import annotations

import torch

from paceline.engine.api import EngineContext
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


def start(context: EngineContext) -> NcclEngine:
    """The engine, on every rank."""
    return NcclEngine(context, find(), CudaDevice)
