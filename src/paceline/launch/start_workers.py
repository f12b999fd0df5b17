"""Starts the workers of a generation on this machine: their variables, streams, cores and processes."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.launch.alarm import Alarm
from paceline.launch.compat import horovods_variables
from paceline.launch.environment import Place, place_variables
from paceline.launch.failures import Failure
from paceline.launch.generation import Generation
from paceline.launch.gpus import device_of
from paceline.launch.job import Job
from paceline.launch.kept_memory import Keeper, KeptMemory
from paceline.launch.keyboard import Keyboard
from paceline.launch.logs import Logs
from paceline.launch.nodes.messages import Start
from paceline.launch.pipes import WITHOUT_PAGERS, Output, outputs_of
from paceline.launch.placement import Cores
from paceline.launch.starting import Interpreters, Starter, Template
from paceline.launch.values import Streams
from paceline.launch.worker import Worker, allow_descriptors, bootstrap_argv, watch_end


def place_of(job: Job, start: Start, index: int) -> Place:
    """Returns the ranks of the worker `index` of this launcher."""
    slot, slots = job.slot
    return Place(
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
    """Returns the variables in which a worker differs from the others."""
    place = place_of(job, start, index)
    master = (start.master_addr, start.master_port)
    variables = place_variables(place, master, start.run_id, start.restart_count, start.max_restarts)
    if job.virtual_local_rank:
        variables["CUDA_VISIBLE_DEVICES"] = device_of(place.local_rank, environment, gpus)
        variables["LOCAL_RANK"] = "0"
    if "horovod" in job.compat:
        variables |= horovods_variables(variables)
    return variables


def drawing_index(job: Job, start: Start) -> int:
    """Returns which worker may draw on the terminal: the one that reads stdin if it is shown here, else the first."""
    slot, _ = job.slot
    shown = [i for i in range(job.workers) if not job.output.shown or slot * job.workers + i in job.output.shown]
    reading = None if job.stdin_rank is None else job.stdin_rank - start.first_rank
    return reading if reading in shown else shown[0] if shown else 0


@dataclass(frozen=True)
class Surroundings:
    """What the workers of this machine have in common.

    Attributes:
        environment: the variables that all of them share.
        pass_fds: descriptors that they inherit.
        directory: where they leave their error files.
        cores: the cores of each local rank; None binds no worker.
        gpus: how many GPUs this machine has.
        logs: where their output goes.
        keyboard: the launcher's stdin, which rank `job.stdin_rank` reads if it is started here.
        keeper: keeps what they record.
    """

    environment: Mapping[str, str]
    pass_fds: Sequence[int]
    directory: str
    cores: list[Cores] | None
    gpus: int
    logs: Logs
    keyboard: Keyboard
    keeper: Keeper


@dataclass(frozen=True)
class Prepared:
    """A worker that can be started: its arguments and variables, and the files that become its streams."""

    place: Place
    argv: list[str]
    variables: dict[str, str]
    cores: Cores | None
    outputs: list[Output]
    reads: bool
    error_file: str
    log: str | None
    memory: KeptMemory | None

    def streams(self, nothing: int) -> tuple[int, int, int]:
        """Returns what becomes its stdin, stdout and stderr; `nothing` is the stdin of those that have none."""
        return (0 if self.reads else nothing, self.outputs[0].writing, self.outputs[-1].writing)

    def close(self) -> None:
        """Gives back the memory of a worker that was not started."""
        if self.memory is not None:
            self.memory.release()

    def started(self, pid: int) -> Worker:
        """Returns the worker that process `pid` is.

        Raises:
            ProcessLookupError: it has ended, and was waited for.
        """
        place = self.place
        return Worker(
            place.rank,
            place.local_rank,
            pid,
            self.error_file,
            watch_end(pid),
            self.log,
            reads=self.reads,
            memory=self.memory,
        )


def prepare(job: Job, start: Start, index: int, around: Surroundings) -> Prepared:
    """Prepares the worker `index` of this launcher for the generation that `start` orders.

    Raises:
        OSError: there are no pipes or files for its output.
    """
    place, keyboard = place_of(job, start, index), around.keyboard
    error_file = os.path.join(around.directory, f"error-{start.generation}-{place.rank}.json")
    variables = {
        **variables_of(job, start, index, around.environment, around.gpus),
        "PACELINE_ERROR_FILE": error_file,
        "TORCHELASTIC_ERROR_FILE": f"{error_file}.torch",
        "PACELINE_STDIN": "none" if job.stdin_rank is None else str(job.stdin_rank),
    }
    if keyboard.path is not None:
        variables["PACELINE_TERMINAL"] = keyboard.path
    memory = around.keeper.new(start.generation - 1, place.rank)
    variables.update(memory.variables if memory is not None else {})
    log = around.logs.of_rank(start.generation - 1, place.rank)
    where = (start.generation - 1, place.rank, place.local_rank, index == drawing_index(job, start))
    outputs = outputs_of([around.logs.destination(which, *where) for which in (Streams.OUT, Streams.ERR)])
    if outputs[-1].is_terminal:
        variables.update(WITHOUT_PAGERS)
    return Prepared(
        place=place,
        argv=bootstrap_argv(job.command, place.local_rank),
        variables=variables,
        cores=around.cores[place.local_rank] if around.cores is not None else None,
        outputs=outputs,
        reads=place.rank == job.stdin_rank and keyboard.is_ours(),
        error_file=error_file,
        log=str(log) if log else None,
        memory=memory,
    )


def start_workers(
    job: Job,
    start: Start,
    around: Surroundings,
    *,
    selector: selectors.BaseSelector,
    on_start: Callable[[int], None],
    on_exception: Callable[[Failure], None],
    on_failure: Callable[[Failure], None],
) -> Generation:
    """Starts this machine's workers of the generation that `start` orders; returns the generation, which watches them.

    Args:
        job: says what to run.
        start: the meeting's order, with the ranks.
        around: what the workers have in common.
        selector: the launcher's loop; see `Generation`.
        on_start: is called with the process id of each worker.
        on_exception, on_failure: see `Generation`.

    Raises:
        OSError: a process could not be started.
    """
    generation = Generation(
        start.generation,
        job.shutdown_timeout_s,
        around.keyboard,
        selector,
        Alarm(around.directory),
        on_exception=on_exception,
        on_failure=on_failure,
    )
    descriptors = allow_descriptors(job.workers)
    starter: Starter = (Template if job.forks else Interpreters)(around.environment, around.pass_fds, descriptors)
    with starter, open(os.devnull, "rb") as nothing:
        for index in range(job.workers):
            prepared = prepare(job, start, index, around)
            streams = prepared.streams(nothing.fileno())
            pid = starter.start(prepared.argv, prepared.variables, streams, prepared.cores)
            on_start(pid)
            generation.follow(prepared.started(pid), prepared.outputs)
    return generation
