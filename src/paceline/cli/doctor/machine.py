"""Checks of the local machine. They only read files or query the kernel, and do not need torch."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from paceline.cli.doctor import Diagnostic, Severity
from paceline.operate.launch.workers.cleanup import MARK, marked
from paceline.operate.launch.workers.environment import allowed_cores, cpu_quota
from paceline.operate.launch.workers.placement import count_gpus, domains_of, format_cpulist
from paceline.operate.launch.workers.worker import MemoryCgroup

_GIB = 1 << 30
_SMALL_SHM = _GIB
_FEW_FILES = 4096
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized


def _good(about: str, seen: str) -> Diagnostic:
    return Diagnostic(Severity.GOOD, about, seen)


def _note(about: str, seen: str, reason: str = "", fix: str = "") -> Diagnostic:
    return Diagnostic(Severity.NOTE, about, seen, reason, fix)


def versions() -> list[Diagnostic]:
    """Reports the versions of Python, torch and Paceline, which should be the same on all machines."""
    found = [f"Python {platform.python_version()}"]
    for package in ("torch", "paceline"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} (not installed as a package)")
    return [_good("versions", ", ".join(found))]


def cores() -> list[Diagnostic]:
    """Reports the number of cores that the CPU affinity and the cgroup quota allow, and their NUMA nodes."""
    mine = sorted(os.sched_getaffinity(0))
    quota = cpu_quota()
    nodes = " | ".join(map(format_cpulist, domains_of("node", mine)))
    seen = f"{allowed_cores()} usable (cores {nodes} by NUMA node"
    seen += f"; quota of {quota:g})" if quota is not None else ")"
    if quota is not None and quota < len(mine):
        return [
            _note(
                "cores",
                seen,
                "the cgroup's quota is smaller than the number of visible cores, so the kernel pauses threads",
                "start no more workers than the quota allows; `paceline run` takes it into account",
            )
        ]
    return [_good("cores", seen)]


def memory(root: Path = Path("/")) -> list[Diagnostic]:
    """Reports the machine's memory, the cgroup's memory limit, and the size of /dev/shm."""
    info = {line.split(":")[0]: int(line.split()[1]) << 10 for line in (root / "proc/meminfo").read_text().splitlines()}
    limit = MemoryCgroup.mine(root).limit()
    seen = f"{info['MemAvailable'] / _GIB:.1f} of {info['MemTotal'] / _GIB:.1f} GiB free"
    findings = [_good("memory", seen + (f"; the cgroup's limit is {limit / _GIB:.1f} GiB" if limit else ""))]
    shm = shutil.disk_usage(root / "dev/shm")
    seen = f"{shm.free / _GIB:.1f} of {shm.total / _GIB:.1f} GiB free"
    if shm.total < _SMALL_SHM:
        findings.append(
            Diagnostic(
                Severity.BAD,
                "/dev/shm",
                seen,
                "DataLoader workers and ranks on one machine share data through it; if it is full, SIGBUS kills them",
                "use docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm",
            )
        )
    else:
        findings.append(_good("/dev/shm", seen))
    return findings


def limits() -> list[Diagnostic]:
    """Reports the limits on file descriptors, processes and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = [_good("file descriptors", f"{soft} (up to {hard})")]
    if soft < _FEW_FILES:
        findings[0] = _note(
            "file descriptors",
            f"{soft} (up to {hard})",
            "a large number of DataLoader workers and connections needs more",
            f"run ulimit -n {min(hard, 65536)}",
        )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and count_gpus():
        findings.append(
            _note(
                "locked memory", f"{locked >> 10} KiB", "RDMA and pinned buffers need more", "run ulimit -l unlimited"
            )
        )
    return findings


def network(root: Path = Path("/")) -> list[Diagnostic]:
    """Reports the active network interfaces, their MTUs, the default route, and the address of the local host name."""
    findings = []
    routes = [line.split() for line in (root / "proc/net/route").read_text().splitlines()[1:]]
    default = [fields[0] for fields in routes if fields[1] == "00000000"]
    up = []
    for directory in sorted((root / "sys/class/net").glob("*")):
        state = _read(directory / "operstate")
        if state in ("up", "unknown") and directory.name != "lo":
            speed = _read(directory / "speed")
            fast = f", {speed} Mbit/s" if speed.isdecimal() and int(speed) > 0 else ""
            up.append(f"{directory.name} (MTU {_read(directory / 'mtu')}{fast})")
    leads = f"the default route uses {', '.join(default)}" if default else "no default route"
    findings.append(_good("interfaces", f"{', '.join(up) or 'only loopback'}; {leads}"))
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        address = None
    if address is None or str(address).startswith("127.") or address == "::1":
        findings.append(
            _note(
                "host name",
                f"{name} resolves to {address or 'no address'}",
                "libraries that look up the host's own address, such as gloo, announce an address that no other "
                "machine can reach",
                "add the machine's name with its address to /etc/hosts, or set GLOO_SOCKET_IFNAME",
            )
        )
    else:
        findings.append(_good("host name", f"{name} resolves to {address}"))
    return findings


def ports() -> list[Diagnostic]:
    """Reports whether the default port is free, and the range of ephemeral ports."""
    from paceline.comm.store.tcp_store import port_owner

    given = _read(Path("/proc/sys/net/ipv4/ip_local_port_range")).split()
    span = f"connections use the ports {'-'.join(given)}" if given else ""
    holder = port_owner(29500)
    if holder is None:
        return [_good("ports", f"29500 is free; {span}")]
    fix = "stop it if it is one of your old jobs, or pass --master-port"
    return [_note("ports", f"29500 is in use by {holder}; {span}", "torchrun's default port is taken", fix)]


def clock() -> list[Diagnostic]:
    """Reports whether the clock is synchronized according to the kernel."""
    buffer = ctypes.create_string_buffer(256)  # struct timex; modes=0 requests a read-only call
    state = ctypes.CDLL(None).adjtimex(buffer)
    if state == _TIME_ERROR:
        fix = "start chronyd or systemd-timesyncd; in a virtual machine, check the host's clock"
        return [_note("clock", "not synchronized", "the times in the logs of several machines cannot be compared", fix)]
    return [_good("clock", "synchronized")]


def accelerators(root: Path = Path("/")) -> list[Diagnostic]:
    """Reports the GPUs, their driver, and the NCCL and MPI libraries."""
    gpus = count_gpus(root=root)
    driver = _read(root / "proc/driver/nvidia/version").partition("\n")[0]
    nccl = find_spec("nvidia") is not None and find_spec("nvidia.nccl") is not None
    has_nccl = nccl or ctypes.util.find_library("nccl") is not None
    mpi = shutil.which("mpirun")
    seen = f"{gpus} GPUs{f' ({driver})' if driver else ''}; NCCL {'found' if has_nccl else 'not found'}; "
    findings = [_good("accelerators", seen + (f"MPI {mpi}" if mpi else "MPI not found"))]
    if gpus and not has_nccl:
        why = "without it, the nccl backend is not available for the GPUs"
        findings.append(_note("NCCL", "not found", why, "install a CUDA build of torch, which includes it"))
    return findings


def leftovers() -> list[Diagnostic]:
    """Reports the current user's processes from other Paceline jobs. Reports nothing if called within a job."""
    pids = marked("") if os.environ.get(MARK) is None else []
    if not pids:
        return [_good("other jobs", "this user has none on this machine")]
    seen = f"{len(pids)} processes of Paceline jobs run here: {', '.join(map(str, sorted(pids)[:8]))}"
    return [_note("other jobs", seen, "they use the same cores and GPUs", "stop them if they are no longer needed")]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


CHECKS: tuple[Callable[[], list[Diagnostic]], ...] = (
    versions,
    cores,
    memory,
    limits,
    network,
    ports,
    clock,
    accelerators,
    leftovers,
)


def check_machine() -> list[Diagnostic]:
    """Runs all checks and returns their findings. An error raised by a check is reported as a note."""
    findings: list[Diagnostic] = []
    for check in CHECKS:
        try:
            findings += check()
        except (OSError, KeyError, ValueError, IndexError) as error:
            findings.append(_note(check.__name__, f"could not be checked ({error})"))
    return findings
