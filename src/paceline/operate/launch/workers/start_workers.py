"""Startup of a generation's workers on this machine: their ranks, variables, streams, cores and processes.

`modules_to_fork` decides whether a worker is a new interpreter, or a fork of a template process that has finished its
imports. `describe_plan` prints the workers for `--dry-run` in lines that can be pasted into a shell.
"""

from __future__ import annotations

import os
import selectors
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.comm.security.secret import chosen_level
from paceline.operate.launch.elastic_options import ElasticOptions
from paceline.operate.launch.failures import TORCH_SUFFIX, ExceptionNotice, WorkerFailure
from paceline.operate.launch.job import CommandKind, Job
from paceline.operate.launch.job_directory import JobRecordings
from paceline.operate.launch.multinode.protocol import Start
from paceline.operate.launch.workers.environment import (
    WorkerRanks,
    allowed_cores,
    compat_variables,
    horovod_variables,
    rank_variables,
    threads_per_worker,
)
from paceline.operate.launch.workers.forker import Forker, python
from paceline.operate.launch.workers.job_control import Keyboard
from paceline.operate.launch.workers.output import WITHOUT_PAGERS, Logs
from paceline.operate.launch.workers.placement import (
    Cores,
    cores_of_workers,
    count_gpus,
    format_cpulist,
    variables_of_gpu,
)
from paceline.operate.launch.workers.script_source import ScriptSource
from paceline.operate.launch.workers.worker import allow_descriptors, bootstrap_argv
from paceline.operate.launch.workers.worker_group import WorkerGroup, WorkerSpec

_MANY_A_CORE = 8
# Variables for tools that observe an interpreter from its start.
_OBSERVERS = (
    "COVERAGE_PROCESS_CONFIG",
    "COVERAGE_PROCESS_START",
    "COV_CORE_SOURCE",
    "CUDA_INJECTION64_PATH",
    "LD_AUDIT",
    "PYTHONPERFSUPPORT",
    "PYTHONPROFILEIMPORTTIME",
)
# Variables that make OpenMP choose cores when torch is imported, before a forked worker is bound to its own cores.
_OPENMP_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_COMPILER = "torch._dynamo"  # imported by a process's first optimizer; this takes as long as importing torch
_ELASTIC_STATE = "paceline.train.elastic.worker.elastic_state"
_DDP = "paceline.train.ddp.distributed_data_parallel"
_UNKNOWN = "<chosen at the start>"


@dataclass(frozen=True)
class WorkerContext:
    """The common context of this machine's workers."""

    environment: Mapping[str, str]  # variables that all workers share
    pass_fds: Sequence[int]  # file descriptors that workers inherit
    directory: str  # contains the workers' error files
    cores: list[Cores] | None  # cores of each local rank; None if workers are not bound
    gpus: int  # number of GPUs on this machine
    logs: Logs
    keyboard: Keyboard  # rank `job.stdin_rank` reads from it if started here
    recordings: JobRecordings


def start_workers(
    job: Job,
    start: Start,
    context: WorkerContext,
    *,
    selector: selectors.BaseSelector,
    print_line: Callable[[str], None],
    on_start: Callable[[int], None],
    on_exception: Callable[[WorkerFailure], None],
    on_failure: Callable[[WorkerFailure], None],
) -> WorkerGroup:
    """Starts this machine's workers for a generation; returns their group, which gets the remaining arguments."""
    # Each generation has its own template. /proc/PID/environ of a fork always contains the environment of the template,
    # and `Cleanup` searches this file for the generation's mark to find the remaining processes. If a template were
    # reused, these processes could not be distinguished from the template and the workers of the next generation.
    forker = Forker(
        context.environment,
        context.pass_fds,
        allow_descriptors(job.workers),
        selector,
        print_line,
        modules_to_fork(job),
    )
    generation = WorkerGroup(
        start.generation,
        job.workers,
        job.shutdown_timeout_s,
        context.keyboard,
        selector,
        ExceptionNotice(context.directory),
        forker,
        on_start=on_start,
        on_exception=on_exception,
        on_failure=on_failure,
    )
    try:
        for index in range(job.workers):
            generation.start(prepare(job, start, index, context))
    except OSError:
        generation.close()
        raise
    return generation


def modules_to_fork(job: Job) -> tuple[str, ...] | None:
    """Returns the modules to import before this machine's workers are forked.

    Of the modules that the program uses, these take longest to import. If the result is None, each worker is started in
    a new interpreter. The workers of an elastic job are forked unless the user's options or the kind of program require
    new interpreters. In other jobs, unless the user chose a method, workers are forked if there are several of them and
    their program imports torch. New interpreters are used if the program might set variables that are read while torch
    is imported, if OpenMP binds the program's threads, or if a tool observes the program from its start. If there are
    many workers per core, they are forked in any case, because they cannot be training.
    """
    if job.start_method == "spawn":
        return None
    is_bound = any(name in os.environ for name in _OPENMP_BINDINGS)
    if job.elastic is not None:
        if job.command.kind is CommandKind.PROGRAM:
            return None
        return () if is_bound else _torch_modules(ScriptSource.of(job.command), _ELASTIC_STATE)
    must_fork = job.start_method == "fork" or job.workers > _MANY_A_CORE * allowed_cores()
    is_observed = any(name in os.environ for name in _OBSERVERS) or python() != sys.executable
    if not must_fork and (job.workers == 1 or is_observed):
        return None
    source = None if is_bound or job.compat else ScriptSource.of(job.command)
    if source is None or source.sets_variables or not source.imports_torch:
        return () if must_fork else None
    return _torch_modules(source, *([_DDP] if source.uses_paceline else []))


def _torch_modules(source: ScriptSource | None, *others: str) -> tuple[str, ...]:
    compiler = [_COMPILER] if source is None or source.uses_optimizers else []
    return ("torch", *compiler, *others)


def prepare(job: Job, start: Start, index: int, context: WorkerContext) -> WorkerSpec:
    """Prepares this launcher's worker `index` for the generation described by `start`; may raise OSError."""
    place, keyboard = ranks_of(job, start, index), context.keyboard
    error_file = os.path.join(context.directory, f"error-{start.generation}-{place.rank}.json")
    variables = {
        **variables_of(job, start, index, context.environment, context.gpus),
        "PACELINE_ERROR_FILE": error_file,
        "TORCHELASTIC_ERROR_FILE": f"{error_file}{TORCH_SUFFIX}",
        "PACELINE_STDIN": "none" if job.stdin_rank is None else str(job.stdin_rank),
    }
    if keyboard.path is not None:
        variables["PACELINE_TERMINAL"] = keyboard.path
    attempt = start.generation - 1
    memory = context.recordings.new(attempt, place.rank)
    if memory is not None:
        variables |= memory.variables
    log = context.logs.of_rank(attempt, place.rank)
    outputs = context.logs.outputs(attempt, place.rank, place.local_rank, index == drawing_index(job, start))
    if outputs[-1].is_terminal:
        variables |= WITHOUT_PAGERS
    return WorkerSpec(
        place=place,
        argv=bootstrap_argv(job.command, place.local_rank),
        variables=variables,
        cores=context.cores[place.local_rank] if context.cores is not None else None,
        outputs=outputs,
        reads=place.rank == job.stdin_rank and keyboard.is_ours(),
        error_file=error_file,
        log=str(log) if log else None,
        memory=memory,
    )


def ranks_of(job: Job, start: Start, index: int) -> WorkerRanks:
    """Returns the ranks of this launcher's worker `index`."""
    slot, slots = job.slot
    return WorkerRanks(
        rank=start.first_rank + index,
        world_size=start.world_size,
        local_rank=slot * job.workers + index,
        local_world_size=slots * job.workers,
        group_rank=start.group_rank,
        group_world_size=start.group_world_size,
        role_rank=start.role_first_rank + index,
        role_world_size=start.role_world_size,
        role=job.role,
    )


def variables_of(job: Job, start: Start, index: int, environment: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Returns the variables that differ between workers."""
    place = ranks_of(job, start, index)
    master = (start.master_addr, start.master_port)
    variables = rank_variables(place, master, start.run_id, start.restart_count, start.max_restarts)
    if job.virtual_local_rank:
        variables |= variables_of_gpu(place.local_rank, environment, gpus)
        variables["LOCAL_RANK"] = "0"
    if "horovod" in job.compat:
        variables |= horovod_variables(variables)
    return variables


def drawing_index(job: Job, start: Start) -> int:
    """Returns the index of the worker that may draw: the one that reads stdin if shown, else the first one shown."""
    slot, _ = job.slot
    shown = [i for i in range(job.workers) if not job.output.shown or slot * job.workers + i in job.output.shown]
    reading = None if job.stdin_rank is None else job.stdin_rank - start.first_rank
    return reading if reading in shown else shown[0] if shown else 0


@dataclass(frozen=True)
class MachineResources:
    """The resources of this machine's workers, determined before any worker starts."""

    workers: int  # number of workers on this machine, including those of the scheduler's other launchers
    gpus: int
    cores: list[Cores] | None  # cores by local rank; None if workers are not bound
    threads: int | None  # OMP_NUM_THREADS; None if the user has set it

    @classmethod
    def mine(cls, job: Job) -> MachineResources:
        """Returns the resources for `job`."""
        workers = job.workers * job.slot[1]
        gpus = count_gpus()
        cores = cores_of_workers(job.binding, workers, gpus) if job.binding is not None else None
        if workers == 1 and not job.is_binding_requested:
            cores = None  # a single worker may use all cores
        return cls(workers, gpus, cores, threads_per_worker(allowed_cores(), workers, os.environ))

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns `base` with the variables shared by this machine's workers."""
        return {**base, **self.thread_variables}

    @property
    def thread_variables(self) -> dict[str, str]:
        """The variable with the number of threads for each worker, unless the user has set it."""
        return {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}

    def remarks(self, job: Job) -> list[str]:
        """Returns remarks for the user, one line each."""
        lines = []
        if job.scheduler is not None:
            lines.append(f"found {job.scheduler}")
        if self.workers > 1 and self.threads is not None and job.slot[0] == 0:
            bound = ""
            if self.cores is not None:
                bound = f" on cores {' | '.join(map(format_cpulist, self.cores[:16]))} (--no-pin: on any)"
            lines.append(f"OMP_NUM_THREADS={self.threads} for each of {self.workers} workers{bound}")
        if self.cores is None and job.is_binding_requested:
            lines.append(
                f"--numa-binding exclusive: {self.workers} workers need more cores than this machine has; none is bound"
            )
        if 0 < self.gpus < self.workers and not job.virtual_local_rank:
            lines.append(
                f"{self.workers} workers share {self.gpus} GPU{'s' if self.gpus > 1 else ''}: local ranks 0 and "
                f"{self.gpus} both get GPU 0. They slow each other down and share its memory; --nproc-per-node "
                f"{self.gpus} (or gpu) gives each worker its own"
            )
        return lines


def describe_plan(job: Job, machine: MachineResources) -> str:
    """Returns the description of a job for `--dry-run`."""
    rendezvous = job.rendezvous
    lines = machine.remarks(job)
    if rendezvous.address is None:
        lines.append(f"one machine: {socket.gethostname()}; run id {job.run_id}; the rendezvous is at a Unix socket")
    else:
        least, most = rendezvous.min_nodes, rendezvous.max_nodes
        count = f"{least}" if least == most else f"{least} to {most}"
        number = f"; this is machine {rendezvous.node_rank}" if rendezvous.node_rank is not None else ""
        lines.append(
            f"{count} machines, with the rendezvous at {rendezvous.address[0]}:{rendezvous.address[1]}{number}"
        )
        has_secret = any(name in os.environ for name in ("PACELINE_SECRET", "PACELINE_SECRET_FILE"))
        is_made = job.scheduler is not None and job.scheduler.is_slurm
        otherwise = "created by launcher 0, in a file" if is_made else "none yet; set PACELINE_SECRET on all"
        lines.append(f"connections between machines: {chosen_level() or 'encrypt where an address is public'}")
        if job.one_port is not None:
            lines.append(f"each machine is reached at port {job.one_port} only")
        lines.append(f"secret: {'from the environment' if has_secret else otherwise}")
    replaced = f"{job.max_restarts} restarts" if job.elastic is None else _replacement(job.elastic)
    lines.append(
        f"on failure: {replaced}; to end: {', '.join(number.name for number in job.signals)}, then "
        f"{job.shutdown_timeout_s:g} s until SIGKILL"
    )
    start = _start(job)
    if start is None:
        lines.append(f"{job.workers} workers here; their ranks are assigned at the rendezvous")
        start = Start(1, 0, job.max_restarts, job.run_id, 0, 1, 0, job.workers, 0, job.workers, _UNKNOWN, 0)
    for index in range(job.workers):
        lines += ["", *_worker(job, machine, start, index)]
    return "\n".join(lines)


def _replacement(elastic: ElasticOptions) -> str:
    most = "" if elastic.most_replacements is None else f", at most {elastic.most_replacements} times on each machine"
    chaos = f"; chaos: {elastic.chaos}" if elastic.chaos is not None else ""
    return f"a worker is replaced while at least {elastic.min_workers} continue training{most}{chaos}"


def _start(job: Job) -> Start | None:
    """Returns the order that the rendezvous would send, or None if it cannot be predicted."""
    rendezvous = job.rendezvous
    if rendezvous.address is None:
        nodes, node, address = 1, 0, "127.0.0.1"
    elif rendezvous.node_rank is not None:
        nodes, node, address = rendezvous.max_nodes, rendezvous.node_rank, rendezvous.address[0]
    else:
        return None
    first, world = node * job.workers, nodes * job.workers  # assumes the same number of workers on each machine
    return Start(1, 0, job.max_restarts, job.run_id, node, nodes, first, world, first, world, address, job.port or 0)


def _worker(job: Job, machine: MachineResources, start: Start, index: int) -> list[str]:
    place = ranks_of(job, start, index)
    variables = variables_of(job, start, index, os.environ, machine.gpus)
    variables |= compat_variables(job.compat, os.environ) | machine.thread_variables
    if start.master_port == 0:
        variables["MASTER_PORT"] = _UNKNOWN
    where = f"on cores {format_cpulist(machine.cores[place.local_rank])}" if machine.cores else "on any core"
    interpreter = [] if job.command.kind is CommandKind.PROGRAM else [python()]
    module = ["-m"] if job.command.kind is CommandKind.MODULE else []
    program, *arguments = job.command.argv
    legacy = [f"--local_rank={place.local_rank}"] if job.command.passes_local_rank else []
    return [
        f"{'rank' if job.elastic is None else 'slot'} {place.rank}, {where}:",
        *(f"  {name}={shlex.quote(value)} \\" for name, value in variables.items()),
        f"  {shlex.join([*interpreter, *module, program, *legacy, *arguments])}",
    ]
