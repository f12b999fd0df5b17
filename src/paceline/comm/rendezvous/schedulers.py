"""Reads environment variables to detect the scheduler that started this process, and the job's machines.

A scheduler starts one launcher per machine or, like `mpirun -np 8`, one per rank. In the second case each launcher
starts one worker, and the launcher's `slot` is its number among the launchers on the machine. If the scheduler starts
the script itself, without a launcher, each process is a rank (`shared_store.py`). These variables, which are documented
in the schedulers' manuals, are used:

    Slurm                 SLURM_PROCID, SLURM_NTASKS, SLURM_NODEID, SLURM_NNODES, SLURM_LOCALID, SLURM_STEP_NODELIST
    Open MPI              OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MPICH, Intel MPI      PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    Kubernetes            JOB_COMPLETION_INDEX in an indexed Job, alone or in a JobSet
    Ray                   the variables that Ray Train sets for a worker, and RAY_JOB_ID
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from zlib import crc32

from paceline.durations import whole_number

_SLURM, _OPEN_MPI, _PMI = "Slurm", "Open MPI", "MPI (PMI)"
_PORTS = range(20000, 30000)  # below the ports that Linux assigns to connecting sockets


@dataclass(frozen=True)
class Scheduler:
    """A job as described by a scheduler's variables; a field whose variable is not set is None."""

    name: str  # the scheduler's name
    node_rank: int  # the number of this launcher
    nodes: int | None  # the number of launchers
    address: str | None  # the address of launcher 0's machine
    port: int | None  # the port of the launchers' rendezvous
    slot: tuple[int, int] = (0, 1)  # this launcher's number among the launchers on its machine, and their number
    job: str = ""  # an identifier for this launch; empty if no variable contains one

    @property
    def is_one_a_rank(self) -> bool:
        """Whether the scheduler started a separate launcher for each rank on this machine."""
        return self.slot[1] > 1

    @property
    def is_slurm(self) -> bool:
        """Whether the scheduler is Slurm."""
        return self.name == _SLURM

    @property
    def starts_ranks(self) -> bool:
        """Whether a process that the scheduler started without a launcher is a rank."""
        return self.name in (_SLURM, _OPEN_MPI, _PMI)

    @property
    def is_one_machine(self) -> bool:
        """Whether all launchers are on this machine."""
        return self.slot[1] == self.nodes

    def __str__(self) -> str:
        return (
            f"{self.name}: launcher {self.node_rank} of {self.nodes or '?'}, with the rendezvous at "
            f"{self.address or '?'}"
        )


def detect(environment: Mapping[str, str], host_name: Callable[[], str] = socket.getfqdn) -> Scheduler | None:
    """Returns the scheduler whose variables are all set, or None if there is none or if it started only one process."""
    for detector in (_open_mpi, _slurm, _pmi, _kubernetes, _ray):
        found = detector(environment, host_name)
        if found is not None and found.nodes != 1:
            return found
    return None


def _slurm(env: Mapping[str, str], _: Callable[[], str]) -> Scheduler | None:
    """Detects Slurm only under srun. In the batch script itself, which runs once, SLURM_STEP_NODELIST is not set.

    An mpirun in the batch script starts its helpers with srun, so the ranks inherit variables from srun that contradict
    those from mpirun. MPI_LOCALNRANKS indicates MPICH's mpirun.
    """
    hosts = env.get("SLURM_STEP_NODELIST")
    if hosts is None or "MPI_LOCALNRANKS" in env or not {"SLURM_PROCID", "SLURM_NTASKS"} <= env.keys():
        return None
    rank, tasks = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS"))
    if rank >= tasks:
        raise ValueError(
            f"this is task {rank} of {tasks} by SLURM_PROCID and SLURM_STEP_NUM_TASKS, so the step spans several "
            "components of a heterogeneous job, which cannot see each other; start it with `env -u SLURM_PROCID "
            "paceline run` and pass --nnodes, --node-rank and --master-addr"
        )
    nodes = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", tasks))
    port = port_of(env.get("SLURM_JOB_ID", "") + env.get("SLURM_STEP_ID", ""))
    address = expand_hostlist(hosts)[0]
    job = "-".join(env.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    slot = (0, 1)
    if tasks > nodes:
        slot = (_number(env, "SLURM_LOCALID", 0), tasks_of_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), env))
    return Scheduler(_SLURM, rank, tasks, address, port, slot, job)


def tasks_of_node(text: str, env: Mapping[str, str]) -> int:
    """Returns this node's number of tasks, given a string such as "4(x2),3" (see SLURM_STEP_TASKS_PER_NODE)."""
    counts: list[int] = []
    for part in text.split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else _number(env, "SLURM_NTASKS_PER_NODE", 1)


def expand_hostlist(text: str) -> list[str]:
    """Expands Slurm's abbreviated lists of host names.

    >>> expand_hostlist("gpu[01-03,7],login")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    return [host for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for host in _expand(part)]


def _expand(text: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", text)
    if match is None:
        return [text]
    head, tails = text[: match.start()], _expand(text[match.end() :])
    numbers: list[str] = []
    for span in match[1].split(","):
        first, _, last = span.partition("-")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return [f"{head}{number}{tail}" for number in numbers for tail in tails]


def _open_mpi(env: Mapping[str, str], _: Callable[[], str]) -> Scheduler | None:
    if not {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} <= env.keys():
        return None
    rank, size = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    slot = (_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0), _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    job = env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", ""))
    address = "127.0.0.1" if slot[1] == size else env.get("MASTER_ADDR") or _head_of_mpirun(env)
    return Scheduler(_OPEN_MPI, rank, size, address, _given_port(env) or port_of(job), slot, job)


def _head_of_mpirun(env: Mapping[str, str]) -> str | None:
    """Returns the host on which mpirun itself runs; rank 0 runs there by default."""
    uri = re.search(r"tcp://([^,:;]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))  # Open MPI 4
    if uri is not None:
        return uri[1]
    namespace = re.fullmatch(r"prterun-(.+)-\d+@\d+", env.get("PMIX_NAMESPACE", ""))  # Open MPI 5
    return namespace[1] if namespace is not None else None


def _pmi(env: Mapping[str, str], _: Callable[[], str]) -> Scheduler | None:
    if not {"PMI_RANK", "PMI_SIZE"} <= env.keys():
        return None
    rank, size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    slot = (_number(env, "MPI_LOCALRANKID", 0), _number(env, "MPI_LOCALNRANKS", 1))
    address = "127.0.0.1" if slot[1] == size else env.get("MASTER_ADDR")
    port = _given_port(env) or port_of("pmi")
    return Scheduler(_PMI, rank, size, address, port, slot)


def _kubernetes(env: Mapping[str, str], host_name: Callable[[], str]) -> Scheduler | None:
    """Detects an indexed Job (pods named JOB-INDEX) or a JobSet (pods named SET-NAME-JOB-INDEX); indices begin at 0."""
    if "JOB_COMPLETION_INDEX" not in env or "KUBERNETES_SERVICE_HOST" not in env:
        return None
    index = _number(env, "JOB_COMPLETION_INDEX")
    name, _, domain = host_name().partition(".")
    stem = name.removesuffix(f"-{index}")
    first = None if stem == name else f"{stem}-0" + (f".{domain}" if domain else "")
    count = _number(env, "PACELINE_NODES") if env.get("PACELINE_NODES") else None
    name = "Kubernetes (JobSet)" if "JOBSET_NAME" in env else "Kubernetes"
    return Scheduler(name, index, count, env.get("MASTER_ADDR", first), _given_port(env) or 29500)


def _ray(env: Mapping[str, str], _: Callable[[], str]) -> Scheduler | None:
    if not {"RAY_JOB_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        return None
    slot = (_number(env, "LOCAL_RANK", 0), _number(env, "LOCAL_WORLD_SIZE", 1))
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    return Scheduler("Ray", rank, size, env["MASTER_ADDR"], _given_port(env), slot)


def _given_port(env: Mapping[str, str]) -> int | None:
    return _number(env, "MASTER_PORT", most=65535) if env.get("MASTER_PORT") else None


def _number(env: Mapping[str, str], name: str, otherwise: int | None = None, most: int | None = None) -> int:
    if otherwise is not None and name not in env:
        return otherwise
    number = whole_number(env[name].strip())
    if number is None or (most is not None and number > most):
        kind = "of at least 0" if most is None else f"from 0 to {most}"
        raise ValueError(f"the environment variable {name} is {env[name][:100]!r}; it must be a whole number {kind}")
    return number


def port_of(job: str) -> int:
    """Derives a port from the job's name, so that all machines in the job use the same port."""
    return _PORTS[crc32(job.encode()) % len(_PORTS)]
