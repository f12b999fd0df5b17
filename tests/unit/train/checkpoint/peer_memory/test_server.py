"""The server of a launcher that keeps copies of checkpoints."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from checkpoint_copies import ROOT

from paceline.errors import AuthenticationError, CheckpointError
from paceline.train.checkpoint.peer_memory import server as service_module
from paceline.train.checkpoint.peer_memory.client import dial
from paceline.train.checkpoint.peer_memory.protocol import Write, send
from paceline.train.checkpoint.peer_memory.server import CacheServer


def test_strangers_are_not_let_in(tmp_path: Path) -> None:
    with closing(CacheServer(None)) as service:
        address = service.open(str(tmp_path / "door"), b"the secret of this job, which nobody knows")
        with pytest.raises(AuthenticationError):
            dial(address)


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
