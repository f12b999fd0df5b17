"""Finds the GPUs of this machine without torch and without making a CUDA context."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def count_gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Returns how many of the machine's GPUs this process may use under CUDA_VISIBLE_DEVICES."""
    present = len([each for each in (root / "dev").glob("nvidia[0-9]*") if each.name[6:].isdecimal()])
    if not present:  # AMD's GPUs; /dev/kfd exists only with their driver
        present = len(list((root / "dev/dri").glob("renderD*"))) if (root / "dev/kfd").exists() else 0
    visible = visible_devices(environment)
    return present if visible is None else min(present, len(visible))


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the devices that CUDA_VISIBLE_DEVICES (or AMD's variable) names; None if it is not set."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environment:
            named: list[str] = []
            for device in (word.strip() for word in environment[name].split(",")):
                if device in ("", "-1", "NoDevFiles"):
                    break  # like the driver, which ignores the rest
                named.append(device)
            return named
    return None


def device_of(local_rank: int, environment: Mapping[str, str], gpus: int) -> str:
    """Returns the GPU that a rank sees as number `local_rank`, by its name in CUDA_VISIBLE_DEVICES."""
    visible = visible_devices(environment)
    return visible[local_rank % len(visible)] if visible else str(local_rank % max(1, gpus))


def numa_node_of_gpu(index: int, root: Path = Path("/")) -> int | None:
    """Returns the NUMA node of GPU `index` according to NVIDIA's driver; None if it does not say."""
    for gpu in (root / "proc/driver/nvidia/gpus").glob("*"):
        try:
            minor = re.search(r"Device Minor:\s*(\d+)", (gpu / "information").read_text())
            node = int((root / "sys/bus/pci/devices" / gpu.name.lower() / "numa_node").read_text())
        except (OSError, ValueError):
            continue
        if minor is not None and int(minor[1]) == index:
            return node if node >= 0 else None
    return None
