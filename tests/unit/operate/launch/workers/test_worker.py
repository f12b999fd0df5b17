"""Reasons for a worker's death, as shown by the worker's cgroup or the kernel's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.operate.launch.failures import Record, WorkerFailure, describe
from paceline.operate.launch.workers.worker import MemoryCgroup, MemoryWatch


def failure(rank: int, text: str | None, code: int = 1, time_s: float = 1.0) -> WorkerFailure:
    kind = text.partition(":")[0].rpartition(".")[2] if text else ""
    record = Record(time_s, kind, f"Traceback\n{text}\n") if text else None
    return WorkerFailure(rank, 100 + rank, code, time_s, record, host="h0")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2 = {
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/memory.events": "low 0\noom 3\noom_kill 2\n",
    "sys/fs/cgroup/job/memory.max": "2147483648\n",
}

V1 = {
    "proc/self/cgroup": "4:memory:/job\n3:cpuset:/\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2147483648\n",
}

IN_A_CONTAINER = {
    "proc/self/cgroup": "0::/../../somewhere/not/seen\n",
    "sys/fs/cgroup/memory.events": "oom_kill 2\n",
    "sys/fs/cgroup/memory.max": "2147483648\n",
}


@pytest.mark.parametrize("files", [V2, V1, IN_A_CONTAINER], ids=["v2", "v1", "container"])
def test_the_cgroups_counter_tells(files, tmp_path):
    write(tmp_path, files)
    cgroup = MemoryCgroup.mine(tmp_path)
    assert (cgroup.kills(), cgroup.limit()) == (2, 2 << 30)
    watch = MemoryWatch(cgroup)
    assert watch.explain(2**30, 1 << 30) is None, "the kills before were not ours"
    counter = next(name for name in files if "oom_control" in name or "events" in name)
    write(tmp_path, {counter: files[counter].replace("oom_kill 2", "oom_kill 3")})
    told = watch.explain(2**30, 3 << 29)
    assert told.startswith("it had used up to 1.5 GiB; the cgroup's limit is 2.0 GiB for all ranks together.")
    assert watch.explain(2**30, 3 << 29) is None, "one kill explains one worker"


def test_the_kernels_log_counts_from_the_launchers_start(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;Out of memory: Killed process 41 (python)\n")
    watch = MemoryWatch(MemoryCgroup(None), str(log))
    with log.open("a") as file:
        file.write("6,2,9,-;Out of memory: Killed process 42 (python) total-vm:1kB\n6,3,9,-;else\n")
    assert watch.explain(42, 1 << 30) is not None
    assert watch.explain(42, 1 << 30) is not None, "what was read is remembered"
    assert watch.explain(41, 1 << 30) is None, "another process had this number before"
    watch.close()


def test_without_a_cgroup_nothing_is_claimed(tmp_path):
    assert MemoryWatch(MemoryCgroup.mine(tmp_path)).explain(2**30, None) is None
    assert "if it was not killed manually" in describe(failure(0, None, -9))
