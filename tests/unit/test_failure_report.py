"""Which failure explains the others, whether memory was the reason, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launch.failures import Failure, Record, describe, report, signal_name
from paceline.launch.memory import MemoryCgroup, MemoryWatch


def failure(rank: int, text: str | None, code: int = 1, time_s: float = 1.0) -> Failure:
    record = Record(time_s, text.partition(":")[0], f"Traceback\n{text}\n") if text else None
    return Failure(rank, 100 + rank, code, time_s, record, host="h0")


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234",
        "DistBackendError: NCCL error in: ... ncclRemoteError: A call failed possibly due to a network error",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "PeerLostError: rank 1 was lost",
        "DistStoreError: failed to recv, got 0 bytes",
    ],
)
def test_what_another_ranks_death_brings_about_is_a_consequence(text):
    assert failure(0, text).is_consequence
    told = report([failure(0, text, time_s=1.0), failure(1, "ValueError: cause", time_s=2.0)])
    consequence, cause, *_ = told.splitlines()
    assert consequence.startswith("rank 0 (h0, pid 100), a consequence: ")
    assert cause == "rank 1 failed first (h0, pid 101, exit code 1):"


def test_a_consequence_that_comes_alone_is_told_as_the_cause():
    assert report([failure(0, "PeerLostError: rank 1 was lost")]).startswith("rank 0 failed first")


def test_signals_are_named_and_those_without_a_name_numbered():
    assert (signal_name(11), signal_name(40)) == ("SIGSEGV", "signal 40")


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


def test_without_a_cgroup_nothing_is_claimed(tmp_path):
    assert MemoryWatch(MemoryCgroup.mine(tmp_path)).explain(2**30, None) is None
    assert "if nobody killed it by hand" in describe(failure(0, None, -9))
