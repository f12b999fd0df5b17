"""Worker processes: one process, the forwarding of its output, and the description of its failure.

`MemoryWatch` detects workers killed by the kernel's out-of-memory killer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import select
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from paceline import _core
from paceline.linux import pidfd_open, waits_for_stdin
from paceline.operate.launch.failures import Record, WorkerFailure, crash_line, read_exit
from paceline.operate.launch.job import Command, CommandKind
from paceline.operate.launch.job_directory import RecordingMemory
from paceline.operate.launch.workers.cleanup import kill_group
from paceline.operate.launch.workers.output import OutputStream, WorkerOutput
from paceline.operate.launch.workers.placement import Cores

_FLAG = {
    CommandKind.SCRIPT: [],
    CommandKind.MODULE: ["-m"],
    CommandKind.PATH: ["--path"],
    CommandKind.PROGRAM: ["--exec"],
    CommandKind.STDIN: ["--text"],
}

_NO_PIDFDS = (errno.ENOSYS, errno.EPERM, errno.EINVAL)  # old kernel, or sandbox without the system call
_ADOPTION_S = 0.02
_READ_BYTES = 1 << 16
_MOST_READS = 256
_TAIL_BYTES = 1 << 14
_PROMPT_S = 0.2  # an unfinished line counts as a prompt after this delay


def bootstrap_argv(command: Command, local_rank: int) -> list[str]:
    """Returns the arguments that make the bootstrap program run a command."""
    program, *arguments = command.argv
    if command.passes_local_rank:
        arguments = [f"--local_rank={local_rank}", *arguments]
    text_file = [] if command.text_file is None else [command.text_file]
    return [*_FLAG[command.kind], *text_file, program, *arguments]


@dataclass
class WorkerProcess:
    """A worker process. `exit_code` is negative after a signal, as in `subprocess`, and None while the process runs."""

    rank: int
    local_rank: int
    pid: int
    error_file: str
    pidfd: int  # descriptor from `watch_end`
    log: str | None = None  # directory with the worker's output
    reads: bool = False  # whether the worker reads the launcher's stdin
    memory: RecordingMemory | None = None  # memory for the worker's recording
    exit_code: int | None = None
    peak_bytes: int | None = None

    @property
    def debugger_file(self) -> str:
        """The path of a file that exists while the worker is in `paceline.breakpoint`."""
        return f"{self.error_file}.debugger"

    def collect(self) -> int:
        """Reaps the exited worker, stores its exit code and peak memory, and saves its recording; returns the code."""
        os.close(self.pidfd)
        try:
            _, status, usage = os.wait4(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)
            self.peak_bytes = usage.ru_maxrss * 1024
        except ChildProcessError:  # already reaped elsewhere in this process
            self.exit_code = 0
        if self.memory is not None:
            self.memory.release()
        return self.exit_code

    def signal(self, number: int) -> None:
        """Sends a signal to the worker's process group."""
        kill_group(self.pid, number)


def watch_end(pid: int) -> int:
    """Returns a descriptor that is readable once a current or soon-to-be-adopted child process has exited.

    Raises:
        ProcessLookupError: the process does not exist.
        OSError: no descriptors are left.
    """
    try:
        return pidfd_open(pid)
    except OSError as error:
        if error.errno not in _NO_PIDFDS:
            raise
    reading, writing = os.pipe()
    threading.Thread(target=_close_at_end, args=(pid, writing), name=f"paceline-end-of-{pid}", daemon=True).start()
    return reading


def _close_at_end(pid: int, writing: int) -> None:
    """Waits for a child without reaping it, then closes the write end of the pipe."""
    try:
        while os.path.exists(f"/proc/{pid}"):
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                return
            except ChildProcessError:  # the child has not been adopted yet
                time.sleep(_ADOPTION_S)
    finally:
        os.close(writing)


def allow_descriptors(workers: int) -> tuple[int, int] | None:
    """Raises the launcher's descriptor limit as needed for `workers`; returns the old limit if it was too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 8 * workers + 256
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
    return soft, hard


def bind_process(pid: int, cores: Cores | None, descriptors: tuple[int, int] | None) -> None:
    """Binds a process to cores and limits its descriptors. Processes that it starts later inherit both settings."""
    with contextlib.suppress(OSError):  # the process has exited, or the cores are no longer allowed
        if cores is not None:
            os.sched_setaffinity(pid, cores)
        if descriptors is not None:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, descriptors)


class OutputForwarder:
    """Forwards a worker's output until the worker has closed its streams, or `close` is called.

    The constructor closes this process's copies of the write ends. The data of each key in `selector`, which belongs to
    the launcher's event loop, is a function without arguments.
    """

    def __init__(
        self, worker: WorkerProcess, outputs: Sequence[WorkerOutput], selector: selectors.BaseSelector
    ) -> None:
        self._worker = worker
        self._selector = selector
        self._outputs = [output for output in outputs if output.stream is not None]
        self._open_pipes: dict[int, Callable[[], None]] = {}
        self.deadline_s: float | None = None  # time (monotonic) at which `tick` checks for a prompt
        self._tail = b""
        self._files = [output.file for output in outputs if output.file is not None]
        for output in outputs:
            output.close_ours()
            if output.stream is not None:
                self._read(output.reading, output.stream)

    def tick(self, now_s: float) -> None:
        """Shows the prompt if the worker is waiting for input."""
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self.deadline_s = None
            if waits_for_stdin(self._worker.pid):
                for output in self._outputs:
                    if output.stream is not None:
                        output.stream.prompt()

    def resize(self) -> None:
        """Forwards the terminal's current size to the worker if it writes to a pseudo-terminal."""
        for output in self._outputs:
            output.resize()

    @property
    def tail(self) -> bytes:
        """The end of the output, including the end of each file that the worker itself writes to."""
        return b"\n".join([self._tail, *(file.tail(_TAIL_BYTES) for file in self._files)])

    @property
    def has_more(self) -> bool:
        """Whether there is output waiting to be forwarded."""
        return bool(self._readable())

    def drain(self) -> None:
        """Forwards the output written so far; stops after a while if a process keeps writing."""
        for _ in range(_MOST_READS):
            if not self.has_more:
                return
            for pipe in self._readable():
                self._open_pipes[pipe]()

    def close(self) -> None:
        """Closes every pipe; idempotent."""
        for pipe in self._open_pipes:
            self._selector.unregister(pipe)
        self._open_pipes.clear()
        for output in self._outputs:
            os.close(output.reading)
            if output.stream is not None:
                output.stream.close()
        self._outputs.clear()

    def _readable(self) -> list[int]:
        poll = select.poll()
        for pipe in self._open_pipes:
            poll.register(pipe, select.POLLIN)
        return [pipe for pipe, _ in poll.poll(0)] if self._open_pipes else []

    def _read(self, fd: int, stream: OutputStream) -> None:
        def read() -> None:
            try:
                data = os.read(fd, _READ_BYTES)
            except OSError:  # a pseudo-terminal reports its end as EIO
                data = b""
            if data:
                stream.feed(data)
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                if self._worker.reads:
                    self.deadline_s = time.monotonic() + _PROMPT_S
            else:
                stream.close()
                self._selector.unregister(fd)
                del self._open_pipes[fd]

        self._open_pipes[fd] = read
        self._selector.register(fd, selectors.EVENT_READ, read)


def failure_of(
    worker: WorkerProcess, code: int, record: Record | None, memory: MemoryWatch, output: bytes = b""
) -> WorkerFailure:
    """Returns the failure of a worker that exited with `code`. If Python crashed, its stack is at the end of `output`.

    A recorded exception takes precedence over the exit code, because the worker may have been killed afterwards.
    """
    failure = WorkerFailure(worker.rank, worker.pid, code, time.time(), record, log=worker.log)
    if code == -signal.SIGKILL:
        failure = replace(failure, memory=memory.explain(worker.pid, worker.peak_bytes))
    if record is not None:
        return replace(failure, exit_code=1)
    exit_line, exit_message = read_exit(worker.error_file) if code > 0 else (crash_line(output), "")
    at_exit = os.path.exists(f"{worker.error_file}.at-exit")  # the interpreter had begun to shut down
    return replace(failure, at_exit=at_exit, exit_line=exit_line, exit_message=exit_message)


_GIB = 1 << 30
_KILLED = re.compile(rb"[Kk]illed process (\d+) ")
_NO_LIMIT = 1 << 60  # cgroup version 1 reports a number near 2^63 if there is no limit


@dataclass(frozen=True)
class MemoryCgroup:
    """The cgroup that limits this process's memory; `directory` is None if no cgroup is readable."""

    directory: Path | None

    @classmethod
    def mine(cls, root: Path = Path("/")) -> MemoryCgroup:
        """Returns this process's innermost readable cgroup. A container may expose only one cgroup."""
        directories, _ = _core.cgroups("memory", str(root).rstrip("/"))
        for directory in map(Path, directories):
            if (directory / "memory.events").exists() or (directory / "memory.oom_control").exists():
                return cls(directory)
        return cls(None)

    def kills(self) -> int:
        """Returns the number of processes in this cgroup that the out-of-memory killer has killed."""
        for name in ("memory.events", "memory.oom_control"):
            found = re.search(r"^oom_kill (\d+)$", self._read(name), re.MULTILINE)
            if found:
                return int(found[1])
        return 0

    def limit(self) -> int | None:
        """Returns the memory limit in bytes, or None if there is no limit."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = self._read(name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                return int(text)
        return None

    def _read(self, name: str) -> str:
        try:
            return "" if self.directory is None else (self.directory / name).read_text()
        except OSError:
            return ""


class MemoryWatch:
    """Determines whether the out-of-memory killer killed a worker, using the cgroup's counter or the kernel log."""

    def __init__(self, cgroup: MemoryCgroup | None = None, log: str = "/dev/kmsg") -> None:
        self._cgroup = MemoryCgroup.mine() if cgroup is None else cgroup
        self._reported = self._cgroup.kills()
        self._log = _KernelLog(log)

    @property
    def has_more(self) -> bool:
        """Whether the kernel has killed processes in the cgroup that are not accounted for yet."""
        return self._cgroup.kills() > self._reported

    def close(self) -> None:
        """Closes the kernel log; idempotent."""
        self._log.close()

    def explain(self, pid: int, peak_bytes: int | None) -> str | None:
        """Returns a sentence with memory statistics if the out-of-memory killer killed `pid`, otherwise None."""
        kills = self._cgroup.kills()
        if kills > self._reported:
            self._reported += 1
        elif not self._log.names(pid):
            return None
        used = f"it had used up to {_size(peak_bytes)}" if peak_bytes else "it used too much memory"
        limit = self._cgroup.limit()
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        bound = f"the cgroup's limit is {_size(limit)}" if limit is not None else f"the machine has {_size(memory)}"
        return (
            f"{used}; {bound} for all ranks together. Use smaller batches, fewer DataLoader workers or fewer ranks, or "
            "raise the limit"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / (1 << 20):.0f} MiB"


class _KernelLog:
    """The processes that the kernel log reports as killed since this object was created, if the log is readable."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        self._killed: set[int] = set()
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)  # skips older records; reading the whole log would delay a diagnosis

    def names(self, pid: int) -> bool:
        """Returns True if the log reports that the kernel killed this process."""
        while self._fd >= 0:
            try:
                record = os.read(self._fd, 8192)
            except BrokenPipeError:
                continue  # the record was overwritten
            except OSError:
                break  # end of the log
            self._killed.update(map(int, _KILLED.findall(record)))
            if not record:
                break
        return pid in self._killed

    def close(self) -> None:
        """Closes the log; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
