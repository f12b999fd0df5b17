"""Copies in memory without enough memory, descriptors, threads or launchers, or with a faulty peer."""

from __future__ import annotations

import signal
import threading
from contextlib import closing
from pathlib import Path

import pytest
from checkpoint_copies import ROOT, copying_of
from test_peer_memory import begin, require_step, state_of

from paceline.errors import CheckpointError
from paceline.train.checkpoint import save
from paceline.train.checkpoint.manager import CheckpointManager
from paceline.train.checkpoint.peer_memory import server as service_module
from paceline.train.checkpoint.peer_memory.cache import CheckpointCache, RefusedError, available_nbytes
from paceline.train.checkpoint.peer_memory.client import CacheClient, dial
from paceline.train.checkpoint.peer_memory.protocol import BeginCopy, CachedCheckpoint, Commit, Inventory, Write, send
from paceline.train.checkpoint.peer_memory.replicate import newest_cached, replicate_checkpoint
from paceline.train.checkpoint.peer_memory.server import CacheServer
from paceline.train.checkpoint.save import SaveHandle


def test_memory_is_not_granted_twice() -> None:
    free = 1000
    with closing(CheckpointCache(available=lambda: free)) as vault:
        vault.begin(begin("1", nbytes=600))  # of one rank
        with pytest.raises(RefusedError, match="the 1.0 kB of memory that are left, of which 600 B are for other"):
            vault.begin(begin("1", nbytes=600))  # of another one, before the first has written anything
        free = 700
        vault.wrote(ROOT, "1", 300)
        vault.begin(begin("1", nbytes=300))
        free = 400
        vault.wrote(ROOT, "1", 300)
        vault.commit(Commit(ROOT, "1", {}, {}, 0), b"")  # a rank that wrote less than it announced holds nothing back
        vault.begin(begin("2", keep="1", nbytes=360))


def test_copies_of_roots_left_behind_make_room() -> None:
    left = iter([1000, 1000, 100, 100, 1000, 100])
    with closing(CheckpointCache(available=lambda: next(left))) as vault:
        for root in ("/first", "/second"):
            vault.begin(BeginCopy(root, "1", 1, 1, None, 10))
        vault.begin(BeginCopy("/third", "1", 1, 1, None, 500))
        assert [len(vault.look(root)) for root in ("/first", "/second", "/third")] == [0, 0, 1]
        with pytest.raises(RefusedError, match="use fewer hosts for peer_copies, or none"):
            vault.begin(BeginCopy("/third", "2", 2, 2, "1", 500))


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_a_cgroup_counts(tmp_path: Path, version: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    assert available_nbytes(tmp_path) == 8192
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n" if version == 2 else "4:cpu:/\n3:memory:/job/step\n")
    names = ["memory.max", "memory.current"] if version == 2 else ["memory.limit_in_bytes", "memory.usage_in_bytes"]
    reclaimable = "inactive_file" if version == 2 else "total_inactive_file"
    base = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    for path, limit in (("", "max"), ("job", "5000"), ("job/step", "7000")):
        (base / path).mkdir(parents=True, exist_ok=True)
        for name, text in zip([*names, "memory.stat"], (limit, "4000", f"anon 1\n{reclaimable} 500\n"), strict=True):
            (base / path / name).write_text(text)
    assert available_nbytes(tmp_path) == 5000 - 4000 + 500


def test_of_one_sequence_the_later_step_is_newer() -> None:
    entries = [
        CachedCheckpoint("z", 6, 60, {}, {}),
        CachedCheckpoint("a", 6, 70, {}, {}),
        CachedCheckpoint("b", 6, None, {}, {}),
    ]
    found, _ = newest_cached([Inventory("vault", "", entries)])
    assert found is not None and found.step == 70


class LostRankChannel:
    """The channel of rank 0 after the other rank has died."""

    rank, size, me = 0, 2, "rank 0"

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def gather(self, mine: bytes) -> list[bytes]:
        raise CheckpointError("rank 1 died while a checkpoint was being written")

    def broadcast(self, data: bytes) -> bytes:
        self.sent.append(data)
        return data


def test_a_rank_that_is_not_heard_keeps_nobody_waiting(tmp_path: Path) -> None:
    channel = LostRankChannel()
    with closing(CacheServer(None)) as service:
        address = service.open(str(tmp_path / "door"), None)
        copying = copying_of(1, 0, None, [address, address])
        with pytest.raises(CheckpointError, match="rank 1 died"):
            replicate_checkpoint(copying, (channel, channel), dial)
    assert [text[:1] for text in channel.sent] == [b"-", b"-"]


@pytest.mark.parametrize("nbytes", [-5, 1 << 70])
def test_a_size_that_none_has_ends_the_session(tmp_path: Path, nbytes: int) -> None:
    with closing(CacheServer(None)) as service, closing(dial(service.open(str(tmp_path / "door"), None))) as client:
        send(client._connection, Write(ROOT, "t", "file", nbytes))
        with pytest.raises(OSError, match="has ended or did not answer"):
            client.look(ROOT)


def test_a_launcher_that_cannot_listen_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("the address can be reached from other machines, and this job has no secret")

    monkeypatch.setattr(service_module, "listen", refuse)
    with closing(CacheServer("192.0.2.1")) as service, closing(dial(service.open(str(tmp_path / "door"), None))) as one:
        with pytest.raises(CheckpointError, match="keeps no copy: the address can be reached from other machines"):
            one.listen()
        with pytest.raises(CheckpointError, match="this job has no secret"):
            one.look(ROOT)


def lost_launcher(directory: Path) -> CacheClient:
    with closing(CacheServer(None)) as service:
        return dial(service.open(str(directory / "door"), None))


def test_a_lost_launcher_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"launcher at unix:{tmp_path}/none, which would keep copies, cannot be reached"):
        dial(f"unix:{tmp_path}/none")
    ended = pytest.raises(OSError, match=f"launcher at unix:{tmp_path}/door, which keeps copies, has ended")
    with closing(lost_launcher(tmp_path)) as client, ended:
        client.begin(BeginCopy(ROOT, "1", 1, 1, None, 10))


def test_what_is_done_beside_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        if thread.name == "paceline-copies":
            raise RuntimeError("can't start new thread")
        begin_thread(thread)

    begin_thread = threading.Thread.start
    monkeypatch.setattr(save.threading.Thread, "start", start)
    done: list[str] = []
    assert SaveHandle(lambda: done.append("disk"), "step_1", lambda: done.append("memory")).wait()
    assert done == ["disk", "memory"]


def test_the_last_save_on_sigterm_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "disk"
    with closing(CacheServer(None)) as service:
        monkeypatch.setenv("PACELINE_COPIES", service.open(str(tmp_path / "door"), None))
        manager = CheckpointManager(path, every=100, peer_copies=1)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            manager.save(3, state_of(3))
        assert f"received a request to stop; the checkpoint of step 3 is in {path}" in capsys.readouterr().err
        next(path.glob("step_*/manifest.json")).write_text("{}")
        state = state_of(0)
        with CheckpointManager(path, peer_copies=1) as manager:
            assert manager.restore(state) == 3
    require_step(state, 3)
    assert "restored step 3 from memory" in capsys.readouterr().err
