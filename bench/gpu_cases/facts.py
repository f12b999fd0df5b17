"""Facts about a machine that explain the behavior of its GPUs."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Callable

import torch

_LIMIT_S = 15
_QUERIES = {  # queried with nvidia-smi, so that this process does not open a GPU
    "GPU": "name",
    "driver": "driver_version",
    "compute capability": "compute_cap",
    "compute mode": "compute_mode",
    "MIG": "mig.mode.current",
    "GPU memory": "memory.total",
    "PCIe": "pcie.link.gen.current,pcie.link.width.current",
}


def facts() -> list[dict[str, object]]:
    """Returns a row for each fact that can be determined here; each `value` is a single line."""
    found: dict[str, Callable[[], object]] = {
        "Python": lambda: f"{platform.python_version()}, {sysconfig.get_config_var('SOABI')}",
        "platform": sysconfig.get_platform,
        "os.pidfd_open": lambda: hasattr(os, "pidfd_open"),
        "kernel": platform.release,
        "glibc": lambda: " ".join(platform.libc_ver()),
        "cores": lambda: len(os.sched_getaffinity(0)),
        "/dev/shm": lambda: f"{shutil.disk_usage('/dev/shm').free >> 20} MiB free",
        "locked memory": lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "torch": lambda: torch.__version__,
        "CUDA of torch": lambda: torch.version.cuda or torch.version.hip or "none",
        "GPUs": torch.cuda.device_count,
    }
    if torch.cuda.device_count():
        found |= {
            "NCCL of torch": lambda: ".".join(map(str, torch.cuda.nccl.version())),
            **{
                name: functools.partial(_output, "nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
                for name, query in _QUERIES.items()
            },
        }
    rows: list[dict[str, object]] = []
    for name, value in found.items():
        with contextlib.suppress(OSError, RuntimeError, subprocess.SubprocessError):
            rows.append({"fact": name, "value": "; ".join(dict.fromkeys(str(value()).split("\n")))})
    return rows


def topology() -> str:
    """Returns the output of `nvidia-smi` and `nvidia-smi topo` for the log, or "" if the command fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return f"{_output('nvidia-smi')}\n{_output('nvidia-smi', 'topo', '-m')}\n"
    return ""


def _output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    return done.stdout.strip()
