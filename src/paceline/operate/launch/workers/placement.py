"""Placement of workers on cores and GPUs, which are detected without torch and without a CUDA context."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Cores = tuple[int, ...]

_SYS = Path("/sys/devices/system")
_NVIDIA_SMI_S = 20.0  # long timeout, because the driver may have to start first


def cores_of_workers(
    mode: str,
    workers: int,
    gpus: int,
    allowed: Iterable[int] | None = None,
    system: Path = _SYS,
    environment: Mapping[str, str] = os.environ,
) -> list[Cores] | None:
    """Returns the cores for each worker on this machine under `mode`, or None if workers are not bound."""
    mine = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    domains = domains_of(mode, mine, system)
    preferred: list[int | None] = []
    if gpus and mode in ("node", "exclusive"):
        nodes = (numa_node_of_gpu(device_of(rank, environment, gpus)) for rank in range(workers))
        preferred = [node if node is not None and node < len(domains) else None for node in nodes]
    if mode == "exclusive":
        return assign(domains, siblings_of(mine, system), workers, preferred)
    return [domains[home] for home in _homes([tuple(mine)] * len(domains), workers, preferred)]


def assign(
    domains: Sequence[Cores], siblings: Sequence[Cores], workers: int, preferred: Sequence[int | None] = ()
) -> list[Cores] | None:
    """Returns disjoint sets of cores for the workers, or None if there are more workers than cores.

    The workers are distributed over the NUMA nodes `domains` in order, except those with a `preferred` domain, which is
    the one closest to the worker's GPU. If there are enough cores, hardware threads of one core (`siblings`) are not
    split among workers.
    """
    if workers > sum(map(len, domains)):
        return None
    homes = _homes(domains, workers, preferred)
    placed: dict[int, Cores] = {}
    for domain, cores in enumerate(domains):
        members = [worker for worker, home in enumerate(homes) if home == domain]
        units = [unit for unit in (tuple(c for c in group if c in cores) for group in siblings) if unit]
        if len(units) < len(members):
            units = [(core,) for core in cores]
        for index, worker in enumerate(members):
            mine = units[index * len(units) // len(members) : (index + 1) * len(units) // len(members)]
            placed[worker] = tuple(sorted(core for unit in mine for core in unit))
    return [placed[worker] for worker in range(workers)]


def _homes(domains: Sequence[Cores], workers: int, preferred: Sequence[int | None]) -> list[int]:
    """Assigns workers to domains close to their GPUs, or in proportion to their cores. Never overcommits a domain."""
    homes: list[int] = []
    room = [len(cores) for cores in domains]
    total = sum(room)
    borders = [sum(room[: domain + 1]) for domain in range(len(room))]
    for worker in range(workers):
        wish = preferred[worker] if worker < len(preferred) else None
        if wish is None:
            middle = (worker + 0.5) * total / workers
            wish = next(domain for domain, border in enumerate(borders) if middle < border)
        if not room[wish]:
            wish = max(range(len(room)), key=lambda domain: room[domain])
        room[wish] -= 1
        homes.append(wish)
    return homes


def domains_of(mode: str, allowed: Iterable[int], system: Path = _SYS) -> list[Cores]:
    """Groups the allowed cores by NUMA node (`node`, `exclusive`), `socket`, or L3 cache (`core-complex`)."""
    cores = sorted(allowed)
    if mode in ("node", "exclusive"):
        lists = sorted(system.glob("node/node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
        groups = [parse_cpulist(path.read_text()) for path in lists]
    else:
        name = "topology/package_cpus_list" if mode == "socket" else "cache/index3/shared_cpu_list"
        groups = _groups(cores, name, system)
    found = [tuple(core for core in group if core in set(cores)) for group in groups]
    found = [group for group in found if group]
    return found if sum(map(len, found)) == len(cores) else [tuple(cores)]


def siblings_of(allowed: Iterable[int], system: Path = _SYS) -> list[Cores]:
    """Groups the allowed hardware threads by core."""
    return _groups(sorted(allowed), "topology/thread_siblings_list", system)


def _groups(cores: Sequence[int], name: str, system: Path) -> list[Cores]:
    found: dict[Cores, None] = {}
    for core in cores:
        try:
            group = parse_cpulist((system / f"cpu/cpu{core}" / name).read_text())
        except (OSError, ValueError):
            group = (core,)
        found[tuple(member for member in group if member in cores)] = None
    return list(found)


def parse_cpulist(text: str) -> Cores:
    """Parses the kernel's list format for a set of cores.

    >>> parse_cpulist("0-2,8")
    (0, 1, 2, 8)
    """
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def format_cpulist(cores: Iterable[int]) -> str:
    """Formats cores in the kernel's list format.

    >>> format_cpulist((0, 1, 2, 8))
    '0-2,8'
    """
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def count_gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Returns the number of GPUs that this process may use, taking CUDA_VISIBLE_DEVICES into account."""
    visible = visible_devices(environment)
    if visible == []:
        return 0
    names = [device.name for driver in ("nvidia", "davinci") for device in (root / "dev").glob(f"{driver}[0-9]*")]
    present = len([name for name in names if name.removeprefix("nvidia").removeprefix("davinci").isdecimal()])
    if not present and (root / "dev/kfd").exists():
        present = _count_amd_gpus(root)
    if not present and (root / "dev/dxg").exists():
        present = _count_wsl_gpus(environment, root)
    return present if visible is None else _count_usable(visible, present)


def _count_usable(visible: Sequence[str], present: int) -> int:
    """Counts the GPUs that a driver with `present` GPUs provides to a process for which `visible` is set."""
    if len(set(visible)) < len(visible):
        return 0  # CUDA refuses a list with a GPU that occurs twice
    if visible[0].startswith("MIG-"):
        return 1  # a process uses a single part of a GPU, even if several are listed
    numbers = [index for index, name in enumerate(visible) if name.isdecimal() and int(name) >= present]
    return min(present, *numbers[:1], len(visible))


def _count_amd_gpus(root: Path) -> int:
    """Counts the compute nodes with shaders and an accessible device, as reported by AMD's driver.

    If the driver does not list its nodes, counts all render devices.
    """
    render_nodes = {device.name for device in (root / "dev/dri").glob("renderD*")}
    texts = [_text(path) for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")]
    if not any(texts):
        return len(render_nodes)
    nodes = [dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line) for text in texts]
    return sum(
        node.get("simd_count", "0") != "0" and f"renderD{node.get('drm_render_minor')}" in render_nodes
        for node in nodes
    )


def _count_wsl_gpus(environment: Mapping[str, str], root: Path) -> int:
    """Counts the GPUs that Windows exposes to WSL, which does not create a device file for each GPU."""
    # this directory is not always in PATH
    path = os.pathsep.join([environment.get("PATH", ""), str(root / "usr/lib/wsl/lib")])
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return 0
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            [program, "--list-gpus"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_S,
            check=True,
        )
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return 0


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


_ASCEND_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", _ASCEND_VARIABLE, "ROCR_VISIBLE_DEVICES")


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the devices in CUDA_VISIBLE_DEVICES (or in AMD's or Ascend's variable), or None if none is set."""
    for name in _VARIABLES:
        if name in environment:
            named: list[str] = []
            for device in (word.strip() for word in environment[name].split(",")):
                if device in ("", "-1", "NoDevFiles"):
                    break  # like the driver, ignore all entries after an invalid one
                named.append(device)
            return named
    return None


def device_of(local_rank: int, environment: Mapping[str, str], gpus: int) -> str:
    """Returns the entry in CUDA_VISIBLE_DEVICES for the GPU that a rank sees as number `local_rank`."""
    visible = visible_devices(environment)
    if visible == []:
        return ""
    return visible[local_rank % len(visible)] if visible else str(local_rank % max(1, gpus))


def variables_of_gpu(
    local_rank: int, environment: Mapping[str, str], gpus: int, root: Path = Path("/")
) -> dict[str, str]:
    """Returns the variables that hide all GPUs except the one that a rank sees as number `local_rank`.

    AMD's runtime prefers HIP_VISIBLE_DEVICES to CUDA_VISIBLE_DEVICES, and applies both to the GPUs that remain after
    ROCR_VISIBLE_DEVICES.
    """
    *of_runtimes, of_driver = _VARIABLES
    names = [name for name in of_runtimes if name in environment]
    if not names:
        default = _ASCEND_VARIABLE if (root / "dev/davinci_manager").exists() else of_runtimes[0]
        names = [of_driver if of_driver in environment else default]
    return dict.fromkeys(names, device_of(local_rank, environment, gpus))


def numa_node_of_gpu(device: str, root: Path = Path("/")) -> int | None:
    """Returns the NUMA node of a GPU as reported by NVIDIA's driver, or None if unknown.

    `device` is the GPU's number in the order of PCI addresses, as CUDA numbers GPUs of one model, or its UUID or the
    beginning of its UUID.
    """
    for index, gpu in enumerate(sorted((root / "proc/driver/nvidia/gpus").glob("*"))):
        try:
            uuid = re.search(r"GPU UUID:\s*(\S+)", (gpu / "information").read_text())
            node = int((root / "sys/bus/pci/devices" / gpu.name.lower() / "numa_node").read_text())
        except (OSError, ValueError):
            continue
        if device == str(index) or (device.startswith("GPU-") and uuid is not None and uuid[1].startswith(device)):
            return node if node >= 0 else None
    return None
