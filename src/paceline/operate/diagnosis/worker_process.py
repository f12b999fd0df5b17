"""External inspection of a worker process: kernel counters from /proc, and the Python stack.

The inspection also works if the process is stuck in native code. At startup, a worker of `paceline run` registers
faulthandler for a real-time signal. The handler writes the stack of the receiving thread to a memory file that the
launcher finds through /proc. The signal kills processes that do not handle it, so it is sent only to a process with a
handler, and never to a worker's children. Only the receiving thread's stack is written, because walking the frames of
another running thread could crash the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from paceline.errors import is_user_file
from paceline.linux import pidfd_open, pidfd_send_signal, process_fields, waits_for_stdin
from paceline.operate.diagnosis.job_snapshot import Frame, ProcessActivity, ProcessState, StackLocation

SIGNAL = signal.SIGRTMAX - 7  # rarely used by programs; keep in sync with `operate/launch/workers/bootstrap.py`
FILE = "paceline-stack"  # followed by the process id, because a fork inherits its parent's file

_PAUSE_S = 0.005
_MOST_THREADS = 16
_THREAD_S = 0.1  # time limit for the response from each of the other threads; most threads have no Python frames

_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')
_LOADERS = (
    "torch/utils/data/",
    "paceline/train/data/",
    "paceline/train/logical_shards/shard_loader.py",
    "paceline/train/logical_shards/shard_batches.py",
)
_CALLS = (
    "paceline/comm/group/",
    "paceline/comm/engine/",
    "paceline/comm/functional.py",
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
_COMPILERS = (
    "torch/_dynamo/",
    "torch/_inductor/",
    "torch/_functorch/",
    "torch/utils/cpp_extension.py",
    "triton/compiler/",
    "triton/runtime/",
)
# Files with functions that only call other functions.
_WRAPPERS = (
    "<frozen importlib",
    "/contextlib.py",
    "torch/utils/_contextlib.py",
    "torch/distributed/c10d_logger.py",
    "paceline/interop/torch_backend/patches.py",
)
_CHILD_WAITS = ("/subprocess.py", "/multiprocessing/popen_fork.py", "/multiprocessing/pool.py")
_NETWORK = ("/socket.py", "/ssl.py")
_THREAD_WAITS = ("/threading.py", "/concurrent/futures/_base.py", "/queue.py")
_ACTIVITIES = {"compiles": _COMPILERS, "waits for a child process": _CHILD_WAITS, "uses the network": _NETWORK}
_LAST_FUNCTIONS = ("<module>", "_bootstrap")

_TICKS = os.sysconf("SC_CLK_TCK")
_STATES = {
    "R": ProcessState.RUNS,
    "D": ProcessState.WAITS_FOR_DISK,
    "T": ProcessState.STOPPED,
    "t": ProcessState.TRACED,
}
_ENDED = "ZXx"
_LEAST_CORES = 0.01  # a thread that uses fewer cores than this only polls occasionally
_SWAPPING_FAULTS_S = 50.0  # rate of major page faults that indicates a memory shortage, per second
_CGROUPS = Path("/sys/fs/cgroup")


def parse(text: str) -> tuple[Frame, ...]:
    """Returns the frames of the first stack in `text`, innermost first."""
    frames: list[Frame] = []
    for line in text.splitlines():
        found = _FRAME.match(line)
        if found is not None:
            frames.append(Frame(found[1], int(found[2]) if found[2].isdecimal() else 0, found[3]))
        elif frames:
            break
    return tuple(frames)


def is_whole(text: str) -> bool:
    """Returns True if the text is a complete stack: it ends at the thread's first function or after 100 frames."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and (last.endswith(tuple(f" in {name}" for name in _LAST_FUNCTIONS)) or last == "  ...")


def is_in_a_thread(frames: Sequence[Frame]) -> bool:
    """Returns True if the thread is only waiting for another thread, whose stack is more informative."""
    return bool(frames) and frames[0].file.endswith(_THREAD_WAITS)


def place_of(frames: Sequence[Frame]) -> StackLocation | None:
    """Returns the program location for this stack, in terms of the user's code; None if the stack is empty."""
    if not frames:
        return None
    depth = next((index for index, frame in enumerate(frames) if _is_users(frame)), None)
    is_call = any(_is_in(frame, _CALLS) for frame in frames[:depth])
    within = frames if depth is None else frames[:depth]
    activity = next((name for name, files in _ACTIVITIES.items() if any(_is_in(f, files) for f in within)), "")
    loader = next((frame for frame in reversed(frames[:depth]) if _is_in(frame, _LOADERS)), None)
    if depth is None:
        return StackLocation(
            _library_function(frames[-1]), is_loader=loader is not None, is_call=is_call, activity=activity
        )
    user = frames[depth]
    line = f"{PurePath(user.file).name}:{user.line}"
    is_data = loader is not None or any(_is_in(frame, _LOADERS) for frame in frames[depth:])
    if loader is not None:
        kind = "DataLoader" if "torch/utils/data" in loader.file else "StatefulLoader"
        what = f"{kind}.{loader.function}"
    elif called := [frame for frame in frames[:depth] if not _is_in(frame, _WRAPPERS)]:
        what = _library_function(called[-1])
    elif depth > 0:
        what = ""
    else:
        what = "" if user.function == "<module>" else user.function
    return StackLocation(what, line, is_loader=is_data, is_call=is_call, activity=activity)


def _is_users(frame: Frame) -> bool:
    """Returns True if a frame belongs to the user. PyTorch's files may be in any directory (`pip install --target`)."""
    return is_user_file(frame.file) and not _is_in(frame, (*_LOADERS, *_CALLS, *_COMPILERS))


def _is_in(frame: Frame, parts: Sequence[str]) -> bool:
    return any(part in frame.file for part in parts)


def _library_function(frame: Frame) -> str:
    """Returns the name of a library function, qualified with its module because its class is unknown."""
    module = PurePath(frame.file).stem
    module = PurePath(frame.file).parent.name if module == "__init__" else module
    return f"{module}.{frame.function}"


@dataclass(frozen=True)
class ProcessSample:
    """Counters of a process and its children at one moment."""

    at_s: float
    letter: str  # state of the process in /proc/PID/stat
    cpu_s: float
    file_bytes: int  # bytes read from and written to disks or, if larger, by system calls
    major_faults: int
    swapped_kib: int
    threads: Mapping[int, tuple[int, int]]  # by thread id: ns spent running, and ns spent waiting for a core
    children: frozenset[tuple[int, str]]  # the ids and names of all descendants
    switches: int  # number of times that the main thread has gone to sleep
    is_frozen: bool
    reads_stdin: bool = False
    runnable: frozenset[int] = frozenset()  # the descendants whose main threads run or wait for a core


def sample(pid: int, root: Path = Path("/proc")) -> ProcessSample | None:
    """Samples a process; returns None if it does not exist."""
    fields = _stat(root, pid)
    if not fields:
        return None
    cpu_ticks, file_bytes = 0, 0
    times: dict[int, tuple[int, int]] = {}
    descendants, runnable = _descendants(root, pid), set()
    for member in [pid, *descendants]:
        own = _stat(root, member)
        if member != pid and own[:1] == ["R"]:
            runnable.add(member)
        cpu_ticks += sum(map(int, own[11:15])) if own else 0
        file_bytes += _file_bytes(root, member)
        times |= {thread: _run_times(root, member, thread) for thread in [member, *threads(member, root)]}
    status = _read(root / str(pid) / "status")
    return ProcessSample(
        time.monotonic(),
        fields[0],
        cpu_ticks / _TICKS,
        file_bytes,
        int(fields[9]),
        _number(status, "VmSwap:"),
        times,
        frozenset((child, _read(root / str(child) / "comm").strip()) for child in descendants),
        _number(status, "voluntary_ctxt_switches:"),
        _is_frozen(root, pid),
        waits_for_stdin(pid, str(root)),
        frozenset(runnable),
    )


def between(first: ProcessSample | None, last: ProcessSample | None) -> ProcessActivity:
    """Computes the activity of a process between two samples."""
    if first is None or last is None or last.letter in _ENDED:
        return ProcessActivity(ProcessState.ENDED)
    seconds = max(last.at_s - first.at_s, 1e-3)
    cores = max(0.0, (last.cpu_s - first.cpu_s) / seconds)
    state = _STATES.get(last.letter, ProcessState.SLEEPS)
    faults = (last.major_faults - first.major_faults) / seconds
    if last.is_frozen:
        state = ProcessState.FROZEN
    elif last.swapped_kib and faults > _SWAPPING_FAULTS_S and cores < 0.5:
        state = ProcessState.SWAPS
    started = sorted(name for _, name in last.children ^ first.children if name)
    return ProcessActivity(
        state,
        cores,
        max(0.0, (last.file_bytes - first.file_bytes) / seconds),
        min(1.0, _waited_ns(first, last) * 1e-9 / seconds),
        child=started[0] if started else "",
        wakes_hz=max(0.0, (last.switches - first.switches) / seconds),
        reads_stdin=first.reads_stdin and last.reads_stdin,
    )


def _waited_ns(first: ProcessSample, last: ProcessSample) -> int:
    """Returns the time during which computing threads were runnable but had no core.

    Threads that only poll occasionally are excluded, because they also wait for a core on a busy machine. The kernel
    adds a wait to a thread's time only when the wait ends. A child that gets hardly any time on a core, such as a
    compiler on a busy machine, is therefore recognized by its state.
    """
    elapsed_ns = int((last.at_s - first.at_s) * 1e9)
    waited_ns = 0
    for thread, (ran_ns, ready_ns) in last.threads.items():
        before_ran_ns, before_ready_ns = first.threads.get(thread, (0, 0))
        if ran_ns - before_ran_ns >= _LEAST_CORES * elapsed_ns:
            waited_ns += ready_ns - before_ready_ns
        elif thread in first.runnable & last.runnable:
            waited_ns += elapsed_ns
    return waited_ns


def threads(pid: int, root: Path = Path("/proc")) -> list[int]:
    """Returns the kernel ids of a process's threads, excluding the main thread."""
    with contextlib.suppress(OSError):
        return sorted(int(name) for name in os.listdir(root / str(pid) / "task") if int(name) != pid)
    return []


def _stat(root: Path, pid: int) -> list[str]:
    """Returns the fields in /proc/PID/stat, starting with the state; empty if the process does not exist."""
    try:
        return process_fields(pid, str(root))
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _descendants(root: Path, pid: int) -> list[int]:
    found: list[int] = []
    for task in [pid, *threads(pid, root)]:
        for child in map(int, _read(root / str(pid) / "task" / str(task) / "children").split()):
            found += [child, *_descendants(root, child)]
    return found


def _file_bytes(root: Path, pid: int) -> int:
    """Returns the number of bytes read and written, including those on network file systems, unlike disk counters."""
    text = _read(root / str(pid) / "io")
    at_disk = _number(text, "read_bytes:") + _number(text, "write_bytes:")
    return max(at_disk, _number(text, "rchar:") + _number(text, "wchar:"))


def _number(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


def _run_times(root: Path, pid: int, thread: int) -> tuple[int, int]:
    fields = _read(root / str(pid) / "task" / str(thread) / "schedstat").split()
    return (int(fields[0]), int(fields[1])) if len(fields) > 1 else (0, 0)


def _is_frozen(root: Path, pid: int) -> bool:
    own = next((line[3:] for line in _read(root / str(pid) / "cgroup").splitlines() if line.startswith("0::")), None)
    return own is not None and "frozen 1" in _read(_CGROUPS / own.lstrip("/") / "cgroup.events")


def capture_stack(pid: int, timeout_s: float = 1.0) -> tuple[Frame, ...]:
    """Returns the stack of a worker's main thread, or of the thread that it is waiting for; empty on timeout."""
    return capture_stacks([pid], timeout_s).get(pid, ())


def capture_stacks(pids: Sequence[int], timeout_s: float = 1.0) -> dict[int, tuple[Frame, ...]]:
    """Captures the stacks of several workers, keyed by process id; omits workers that do not respond.

    All signals are sent before the first response is awaited, so one unresponsive process does not delay the others.
    """
    files: dict[int, int] = {}
    signaled = []
    try:
        for pid in pids:
            if (file := _open(pid)) is not None:
                files[pid] = file
                if _send_signal(pid, file):  # a process that is about to exit removes its handler
                    signaled.append(pid)
        deadline_s = time.monotonic() + timeout_s
        found = {pid: frames for pid in signaled if (frames := _answer(files[pid], deadline_s))}
        deadline_s = time.monotonic() + timeout_s
        for pid, frames in found.items():
            if is_in_a_thread(frames):
                found[pid] = _frames_of_other_thread(pid, files[pid], deadline_s) or frames
        return found
    finally:
        for file in files.values():
            os.close(file)


def _send_signal(pid: int, file: int) -> bool:
    """Requests the stack of a worker's main thread; returns whether the worker is still running."""
    try:
        os.ftruncate(file, 0)
        pidfd = pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # old kernel, sandbox, or no free descriptor
        return _send_by_number(pid)
    try:
        pidfd_send_signal(pidfd, SIGNAL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def _send_by_number(pid: int) -> bool:
    """Sends the signal to a process id that belonged to the worker a moment ago."""
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return False
    return True


def _frames_of_other_thread(pid: int, file: int, deadline_s: float) -> tuple[Frame, ...]:
    """Returns the frames of the first other thread that runs the user's code and is not waiting for another."""
    try:
        tgkill = ctypes.CDLL(None).tgkill
    except AttributeError:  # an older C library lacks the function
        return ()
    for thread in threads(pid)[:_MOST_THREADS]:
        if (now_s := time.monotonic()) >= deadline_s:
            break
        os.ftruncate(file, 0)
        tgkill(pid, thread, SIGNAL)
        frames = _answer(file, min(deadline_s, now_s + _THREAD_S))
        if any(map(_is_users, frames)) and not is_in_a_thread(frames):
            return frames
    return ()


def _answer(file: int, deadline_s: float) -> tuple[Frame, ...]:
    """Returns the frames once the stack is complete, or the frames written by the deadline."""
    while True:
        text = os.pread(file, 1 << 20, 0).decode(errors="replace")
        if is_whole(text) or time.monotonic() >= deadline_s:
            return parse(text)
        time.sleep(_PAUSE_S)


def _open(pid: int) -> int | None:
    """Opens the file into which a process writes its stack; returns None if the process has no handler or no file."""
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next((int(line.split()[1], 16) for line in status if line.startswith("SigCgt:")), 0)
        if not caught >> (SIGNAL - 1) & 1:
            return None
        for name in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(f"/memfd:{FILE}-{pid} "):
                return os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # the process exited in the meantime
        pass
    return None
