"""A training loop with one fault: `program.py LIBRARY FAULT DIRECTORY`, where LIBRARY is `paceline` or `torch`.

The fault occurs on the last rank in step 30. Just before, the rank writes the time to DIRECTORY/fault. If memory runs
out, the fault occurs when the kernel kills the rank, so only other processes can observe the time.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

AT, STEPS, SLOW_STEPS = 30, 60, 160  # in fewer than 100 steps, a slow core may be chance and is not reported
DUMP_AFTER_S = 3.0  # seconds after the fault at which torch's ranks write their flight recorders


class Stuck(Dataset[int]):
    """A dataset in which one sample is never returned."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 4:
            time.sleep(1000)
        return index


def work(seconds: float) -> None:
    """Multiplies matrices for the given time, as an evaluation would."""
    matrix, end_s = torch.ones(128, 128), time.monotonic() + seconds
    while time.monotonic() < end_s:
        matrix @ matrix


def save(directory: Path, seconds: float) -> None:
    """Writes checkpoints for the given time."""
    tensor, end_s = torch.ones(1 << 22), time.monotonic() + seconds
    while time.monotonic() < end_s:
        with open(directory / "checkpoint", "wb") as file:
            torch.save(tensor, file)
            os.fsync(file.fileno())


def compile_something(seconds: float) -> None:
    """Waits for a subprocess that is busy for the given time, as a compiler would be."""
    import subprocess

    code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)


def fill_memory() -> None:
    """Allocates memory until the kernel kills this process."""
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20) * 8))


def dump(directory: Path, rank: int) -> None:
    """Writes torch's flight recorder in the format that torch's analyzer reads.

    On gloo, torch 2.13 omits the names of the groups. The analyzer requires these names, so they are filled in here.
    """
    from torch._C._distributed_c10d import _dump_fr_trace
    from torch.distributed.distributed_c10d import _world

    written = pickle.loads(_dump_fr_trace(True, True))
    described = dict(each["process_group"] for each in written.get("entries", []))
    written["pg_config"] = {
        name: {"name": name, "desc": described.get(name, ""), "ranks": str(sorted(_world.pg_group_ranks[group]))}
        for group, name in _world.pg_names.items()
    }
    draft = directory / f"draft_{rank}"
    draft.write_bytes(pickle.dumps(written))
    draft.rename(directory / f"trace_{rank}")


def dump_later(directory: Path, rank: int) -> None:
    """Writes the flight recorder some time after the fault, whatever the main thread does."""
    while not (directory / "fault").exists():
        time.sleep(0.05)
    time.sleep(DUMP_AFTER_S)
    dump(directory, rank)


def main() -> None:
    """Forms the process group and trains."""
    library, fault, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    dist: Any
    if library == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        threading.Thread(target=dump_later, args=(directory, dist.get_rank()), daemon=True).start()
    else:
        import paceline as dist

        dist.init_process_group()
    try:
        train(dist, fault, directory)
    finally:
        if library == "torch":
            dump(directory, dist.get_rank())


def train(dist: Any, fault: str, directory: Path) -> None:
    """Runs the training loop."""
    rank, size = dist.get_rank(), dist.get_world_size()
    is_stray = rank == size - 1
    large, small = torch.ones(1 << 18 if fault == "slow_link" else 4096), torch.ones(128)
    parts = [torch.ones(128) for _ in range(size)]
    groups = [dist.new_group(list(range(size))) for _ in range(2)] if fault == "deadlock" else []
    for step in range(SLOW_STEPS if fault == "slow_core" else STEPS):
        if fault == "slow_core":
            work(0.06 if is_stray else 0.02)
        is_now = step == AT and is_stray
        if is_now:
            if fault != "memory":
                (directory / "fault").write_text(str(time.monotonic()))
            happen(fault)
            communicate(dist, fault, size)
        if step == AT and rank == 0 and fault.startswith("healthy"):
            seconds = float(fault.rpartition("-")[2])
            {"evaluate": work, "compile": compile_something}.get(fault.split("-")[1], lambda s: save(directory, s))(
                seconds
            )
        if step == AT:
            for group in groups if is_stray else reversed(groups):
                dist.all_reduce(small, group=group)
        if is_now and fault == "order":
            dist.broadcast(small, 0)
            dist.all_reduce(large)
        else:
            if not (is_now and fault == "skip"):
                wrong = {"shape": torch.ones(77), "dtype": torch.ones(4096, dtype=torch.float64)}
                dist.all_reduce(wrong.get(fault, large) if is_now else large)
            if is_now and fault == "extra":
                dist.all_reduce(large)
            dist.broadcast(small, rank if is_now and fault == "root" else 0)
        dist.all_gather(parts, small)


def happen(fault: str) -> None:
    """Triggers the fault. Only the rank at fault calls this."""
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "loader":
        for _ in DataLoader(Stuck(), batch_size=2, num_workers=1):
            pass
    elif fault == "stuck":
        reading, _ = os.pipe()  # reading from it blocks in native code while holding the interpreter's lock
        ctypes.PyDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
    elif fault == "raise":
        raise ValueError("bad sample")
    elif fault == "leave":
        sys.exit(0)
    elif fault == "exit":
        os._exit(3)
    elif fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "sleep":
        time.sleep(1000)
    elif fault == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif fault == "child":
        subprocess.run(["sleep", "1000"])
    elif fault == "thread":
        samples: queue.Queue[int] = queue.Queue()
        threading.Thread(target=happen, args=("raise",)).start()
        samples.get()
    elif fault == "memory":
        fill_memory()


def communicate(dist: Any, fault: str, size: int) -> None:
    """Makes a call that no other rank makes. Only the rank at fault calls this."""
    if fault == "receive":
        dist.recv(torch.ones(128), 0)
    elif fault == "group":
        dist.new_group(list(range(size)))


if __name__ == "__main__":
    main()
