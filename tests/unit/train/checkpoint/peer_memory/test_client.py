"""A rank's sessions with the launcher that keeps copies of checkpoints."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from checkpoint_copies import ROOT, two_hosts

from paceline.errors import CheckpointError
from paceline.train.checkpoint.peer_memory.client import CacheClient, dial
from paceline.train.checkpoint.peer_memory.protocol import BeginCopy
from paceline.train.checkpoint.peer_memory.server import CacheServer


def test_a_cut_file_is_not_taken(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as addresses, closing(dial(addresses[0])) as client:
        client.begin(BeginCopy(ROOT, "t", 1, 1, None, 10))
        client.write(ROOT, "t", "file", [memoryview(b"some bytes")])
        with pytest.raises(CheckpointError, match="nothing of other"):
            client.finish(ROOT, "t", "other")
        with closing(dial(addresses[0])) as unfinished:
            unfinished.write(ROOT, "t", "part", [memoryview(b"some")])
        assert [dict(each.held) for each in client.look(ROOT).entries] == [{}]
        client.finish(ROOT, "t", "file")
        assert [dict(each.held) for each in client.look(ROOT).entries] == [{"file": 10}]


def lost_launcher(directory: Path) -> CacheClient:
    with closing(CacheServer(None)) as service:
        return dial(service.open(str(directory / "door"), None))


def test_a_lost_launcher_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"launcher at unix:{tmp_path}/none, which would keep copies, cannot be reached"):
        dial(f"unix:{tmp_path}/none")
    ended = pytest.raises(OSError, match=f"launcher at unix:{tmp_path}/door, which keeps copies, has ended")
    with closing(lost_launcher(tmp_path)) as client, ended:
        client.begin(BeginCopy(ROOT, "1", 1, 1, None, 10))
