"""The workers of one generation on this machine, from their start to the end of the last."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from paceline.launch.environment import Place, place_variables
from paceline.launch.failures import Failure, came_to_its_end, keep, read_record
from paceline.launch.gpus import device_of
from paceline.launch.job import Job
from paceline.launch.keyboard import Keyboard, waits_for_stdin
from paceline.launch.logs import Logs
from paceline.launch.memory import MemoryWatch
from paceline.launch.nodes.messages import Start
from paceline.launch.output import Stream
from paceline.launch.pipes import WITHOUT_PAGERS, Output, outputs_of
from paceline.launch.placement import Cores
from paceline.launch.starting import Interpreters, Starter, Template
from paceline.launch.values import Streams
from paceline.launch.worker import Worker, allow_descriptors, words_of

CONSEQUENCES_S = 0.5  # after a failure, for the ranks that end because of it to say so themselves
_READ_BYTES = 1 << 16
_PROMPT_S = 0.2  # after which an unfinished line is shown to whoever is to answer it


def place_of(job: Job, start: Start, index: int) -> Place:
    """Where the worker `index` of this launcher stands."""
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
    """The variables that set a worker apart from the others."""
    place = place_of(job, start, index)
    master = (start.master_addr, start.master_port)
    variables = place_variables(place, master, start.run_id, start.restart_count, start.max_restarts)
    if job.virtual_local_rank:
        variables["CUDA_VISIBLE_DEVICES"] = device_of(place.local_rank, environment, gpus)
        variables["LOCAL_RANK"] = "0"
    return variables


def drawing_index(job: Job, start: Start) -> int:
    """The worker that may draw on the terminal: the one that reads stdin if it is here and shown, else the first."""
    slot, _ = job.slot
    shown = [i for i in range(job.workers) if not job.output.shown or slot * job.workers + i in job.output.shown]
    reading = None if job.stdin_rank is None else job.stdin_rank - start.first_rank
    return reading if reading in shown else shown[0] if shown else 0


class Generation:
    """Starts the workers of `start`; `selector`'s keys carry functions to call. It is over when `is_over` says so."""

    def __init__(
        self,
        job: Job,
        start: Start,
        environment: Mapping[str, str],
        *,
        pass_fds: Sequence[int],
        directory: str,
        cores: list[Cores] | None,
        gpus: int,
        logs: Logs,
        keyboard: Keyboard,
        selector: selectors.BaseSelector,
        on_start: Callable[[int], None],
        on_failure: Callable[[Failure], None],
    ) -> None:
        self.start = start
        self.failures: list[Failure] = []
        self.workers: list[Worker] = []
        self._selector = selector
        self._on_failure = on_failure
        self._keyboard = keyboard
        self._streams: list[Stream] = []
        self._outputs: list[Output] = []
        self._prompting: list[Stream] = []  # those of the worker that reads stdin
        self._open_pipes: set[int] = set()
        self._memory = MemoryWatch()
        self._grace_s = job.shutdown_timeout_s
        self._next_signal: tuple[float, int] | None = None  # when (monotonic) the workers get which signal
        self._prompt_s: float | None = None  # when (monotonic) to look for one
        self._told_to_end = False
        descriptors = allow_descriptors(job.workers)
        starter: Starter = (Template if job.forks else Interpreters)(environment, pass_fds, descriptors)
        drawing = drawing_index(job, start)
        with starter, open(os.devnull, "rb") as nothing:
            for index in range(job.workers):
                place = place_of(job, start, index)
                error_file = os.path.join(directory, f"error-{start.generation}-{place.rank}.json")
                variables = {
                    **variables_of(job, start, index, environment, gpus),
                    "PACELINE_ERROR_FILE": error_file,
                    "TORCHELASTIC_ERROR_FILE": f"{error_file}.torch",
                    "PACELINE_STDIN": "none" if job.stdin_rank is None else str(job.stdin_rank),
                }
                if keyboard.path is not None:
                    variables["PACELINE_TERMINAL"] = keyboard.path
                log = logs.of_rank(start.generation - 1, place.rank)
                where = (start.generation - 1, place.rank, place.local_rank, index == drawing)
                outputs = outputs_of([logs.destination(which, *where) for which in (Streams.OUT, Streams.ERR)])
                if outputs[-1].is_terminal:
                    variables.update(WITHOUT_PAGERS)
                words = words_of(job.command, place.local_rank)
                reads = place.rank == job.stdin_rank and keyboard.is_ours()
                own_cores = cores[place.local_rank] if cores is not None else None
                streams = (0 if reads else nothing.fileno(), outputs[0].writing, outputs[-1].writing)
                pid = starter.start(words, variables, streams, own_cores)
                on_start(pid)
                log_dir = str(log) if log else None
                worker = Worker(place.rank, place.local_rank, pid, error_file, os.pidfd_open(pid), log_dir, reads)
                self.workers.append(worker)
                self._follow(worker, outputs)

    @property
    def deadline_s(self) -> float | None:
        """When `tick` is to be called."""
        signal_s = self._next_signal[0] if self._next_signal is not None else None
        return min((each for each in (signal_s, self._prompt_s) if each is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Sends the signal that is due, and shows the prompt of a worker that waits for an answer."""
        if self._prompt_s is not None and now_s >= self._prompt_s:
            self._prompt_s = None
            if any(worker.reads and waits_for_stdin(worker.pid) for worker in self.workers):
                for stream in self._prompting:
                    stream.prompt()
        if self._next_signal is not None and now_s >= self._next_signal[0]:
            self._signal(self._next_signal[1])
            self._next_signal = (now_s + self._grace_s, signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM, after_s: float = 0.0) -> None:
        """Asks the workers to end, with SIGKILL for those that have not after the grace period."""
        if self._next_signal is None or after_s == 0.0:
            self._next_signal = (time.monotonic() + after_s, number)
            self.tick(time.monotonic())

    def kill(self) -> None:
        """Ends the workers now."""
        self._signal(signal.SIGKILL)

    def interactive(self) -> Worker | None:
        """The worker that waits for what somebody types: it is in `paceline.breakpoint`, or reads the terminal."""
        running = [worker for worker in self.workers if worker.exit_code is None]
        debugged = [worker for worker in running if os.path.exists(worker.debugger_file)]
        reading = [worker for worker in running if worker.reads and self._keyboard.is_read_by(worker.pid)]
        return next(iter([*debugged, *reading]), None)

    def signal(self, number: int) -> None:
        """Sends a signal to every worker that runs."""
        for worker in self.workers:
            if worker.exit_code is None:
                worker.signal(number)

    def resize(self) -> None:
        """Tells the workers that write to a terminal its present size."""
        for output in self._outputs:
            output.resize()

    @property
    def is_over(self) -> bool:
        """Every worker has ended and its output is passed on; what its children hold open is not waited for."""
        if any(worker.exit_code is None for worker in self.workers):
            return False
        ready = self._selector.select(0)
        return not any(key.fd in self._open_pipes for key, _ in ready)

    def close(self) -> None:
        """Kills what still runs and closes every pipe; idempotent."""
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
            if worker.exit_code is None:
                self._selector.unregister(worker.pidfd)
                worker.collect()
            for pipe in worker.pipes:
                if pipe in self._open_pipes:
                    self._selector.unregister(pipe)
                    self._open_pipes.discard(pipe)
                os.close(pipe)
            worker.pipes.clear()
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._outputs.clear()
        self._keyboard.restore()

    def _follow(self, worker: Worker, outputs: list[Output]) -> None:
        for output in outputs:
            output.close_ours()
            if output.stream is not None:
                worker.pipes.append(output.reading)
                self._streams.append(output.stream)
                self._outputs.append(output)
                if worker.reads:
                    self._prompting.append(output.stream)
                self._read(output.reading, output.stream, worker.reads)

        def ended() -> None:
            self._selector.unregister(worker.pidfd)
            self._ended(worker, worker.collect())

        self._selector.register(worker.pidfd, selectors.EVENT_READ, ended)

    def _read(self, fd: int, stream: Stream, may_prompt: bool) -> None:
        def read() -> None:
            try:
                data = os.read(fd, _READ_BYTES)
            except OSError:  # the end of a pseudo-terminal is EIO
                data = b""
            if data:
                stream.feed(data)
                if may_prompt:
                    self._prompt_s = time.monotonic() + _PROMPT_S
            else:
                stream.close()
                self._selector.unregister(fd)
                self._open_pipes.discard(fd)

        self._open_pipes.add(fd)
        self._selector.register(fd, selectors.EVENT_READ, read)

    def _ended(self, worker: Worker, code: int) -> None:
        if code == 0:
            return
        record = read_record(worker.error_file)
        if self._told_to_end and (not self.failures or (record is None and code in (-signal.SIGTERM, -signal.SIGKILL))):
            return  # it ended because it was told to
        memory = self._memory.explain(worker.pid, worker.peak_bytes) if code == -signal.SIGKILL else None
        exit_code = 1 if record is not None else code  # its exception decides, also when it was slow to end
        at_exit = record is None and came_to_its_end(worker.error_file)
        failure = Failure(
            worker.rank, worker.pid, exit_code, time.time(), record, memory=memory, log=worker.log, at_exit=at_exit
        )
        keep(failure)
        self.failures.append(failure)
        if len(self.failures) == 1:
            self.end(after_s=CONSEQUENCES_S)
            self._on_failure(failure)

    def _signal(self, number: int) -> None:
        self._told_to_end = True
        self.signal(signal.SIGCONT)  # a stopped worker would not hear it
        self.signal(number)
