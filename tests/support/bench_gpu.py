"""Imports `bench/gpu.py` as a module with another name, because pytest imports the folder `tests/gpu` as `gpu`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_BENCH = Path(__file__).parents[2] / "bench"
if str(_BENCH) not in sys.path:
    sys.path.append(str(_BENCH))  # after `tests`, because both folders contain a module `hosts`

_spec = importlib.util.spec_from_file_location("bench_of_gpus", _BENCH / "gpu.py")
assert _spec is not None and _spec.loader is not None
gpu = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = gpu  # dataclasses look up their own module in `sys.modules`
_spec.loader.exec_module(gpu)
