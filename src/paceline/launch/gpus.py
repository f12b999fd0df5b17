"""The GPUs of this machine, found without torch and without making a CUDA context."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def count_gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """The GPUs that this process may use: those that CUDA_VISIBLE_DEVICES leaves of the machine's."""
    present = len([each for each in (root / "dev").glob("nvidia[0-9]*") if each.name[6:].isdecimal()])
    if not present:  # AMD's; /dev/kfd is there with its driver only
        present = len(list((root / "dev/dri").glob("renderD*"))) if (root / "dev/kfd").exists() else 0
    visible = visible_devices(environment)
    return present if visible is None else min(present, len(visible))


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES (or AMD's variable) names; None where it is not set."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environment:
            named: list[str] = []
            for device in (word.strip() for word in environment[name].split(",")):
                if device in ("", "-1", "NoDevFiles"):
                    break  # as the driver does, which ignores what comes after
                named.append(device)
            return named
    return None


def device_of(local_rank: int, environment: Mapping[str, str], gpus: int) -> str:
    """The GPU that a rank finds under the number `local_rank`, as CUDA_VISIBLE_DEVICES would name it."""
    visible = visible_devices(environment)
    return visible[local_rank % len(visible)] if visible else str(local_rank % max(1, gpus))


def numa_node_of_gpu(index: int, root: Path = Path("/")) -> int | None:
    """The NUMA node at which NVIDIA's driver shows GPU `index`, if it tells."""
    for gpu in (root / "proc/driver/nvidia/gpus").glob("*"):
        try:
            minor = re.search(r"Device Minor:\s*(\d+)", (gpu / "information").read_text())
            node = int((root / "sys/bus/pci/devices" / gpu.name.lower() / "numa_node").read_text())
        except (OSError, ValueError):
            continue
        if minor is not None and int(minor[1]) == index:
            return node if node >= 0 else None
    return None
