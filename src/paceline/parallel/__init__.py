"""Public modules with the same names as in `torch.nn.parallel`, and the communication hooks.

May use: `train`. Start reading at `paceline/train/data_parallel.py` and `paceline/train/ddp/hooks.py`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Imports a module on first use."""
    if name not in ("hooks", "parallel_apply", "replicate", "scatter_gather"):
        raise AttributeError(f"module 'paceline.parallel' has no attribute {name!r}")
    return import_module(f"paceline.parallel.{name}")
