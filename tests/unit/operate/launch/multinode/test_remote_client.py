"""Rendezvous at a host name that resolves late or whose address changes, like the names of pods."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from paceline.errors import RendezvousTimeoutError
from paceline.operate.launch.multinode import remote_client
from paceline.operate.launch.multinode.remote_client import connect_in_time

NAME = "train-0.train.default.svc.cluster.local"
SECRET = b"of the job"


class Resolver:
    """Resolves pod names: each look-up of NAME returns the next address, and the last address if none is left."""

    def __init__(self, *answers: str | None) -> None:
        self._answers = answers
        self._real = socket.getaddrinfo
        self.asked = 0

    def __call__(self, name: str | bytes, *arguments: object, **more: object) -> list[object]:
        if name not in (NAME, NAME.encode()):
            return self._real(name, *arguments, **more)  # type: ignore[arg-type, return-value]
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        if answer is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._real(answer, *arguments, **more)  # type: ignore[arg-type, return-value]


@pytest.fixture
def resolver(monkeypatch) -> Callable[..., Resolver]:
    def answers(*of: str | None) -> Resolver:
        made = Resolver(*of)
        monkeypatch.setattr(socket, "getaddrinfo", made)
        monkeypatch.setattr(remote_client, "_SOON_S", 0.0)  # the launcher then reports at once what it is waiting for
        monkeypatch.setattr(remote_client, "_LONGEST_PAUSE_S", 0.02)
        return made

    return answers


@pytest.fixture
def served(monkeypatch) -> Iterator[int]:
    """Opens a port on loopback that accepts clients as the rendezvous server does."""
    monkeypatch.setattr(remote_client, "connect", lambda address, *_: socket.create_connection(address, 20))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_name_is_looked_up_until_it_is_known(resolver, served):
    asked, said = resolver(None, None, None, "127.0.0.1"), []
    with connect_in_time((NAME, served), SECRET, 60, said.append):
        assert asked.asked == 4
    (line,) = said
    assert f"waiting up to 60 s for a launcher at {NAME}:{served}" in line
    assert f"the name {NAME} cannot be resolved yet: Name or service not known" in line


def test_a_name_that_leads_elsewhere_now_is_followed(resolver, served):
    """The pod was restarted with a new address; no process is listening at the previous one."""
    resolver(None, "127.0.0.2", "127.0.0.1")
    said: list[str] = []
    with connect_in_time((NAME, served), SECRET, 60, said.append) as connection:
        assert connection.getpeername()[0] == "127.0.0.1"
    assert len(said) == 2 and "cannot be resolved yet" in said[0] and "refused" in said[1]


def test_a_name_that_stays_unknown_ends_at_the_deadline(resolver):
    resolver(None)
    with pytest.raises(RendezvousTimeoutError, match=f"(?s)the name {NAME} cannot be resolved.*publishNotReady"):
        connect_in_time((NAME, 29500), SECRET, 0.1, lambda _: None)


def test_a_pod_without_a_listener_is_a_matter_of_its_launcher(resolver):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    resolver("127.0.0.1")
    with pytest.raises(RendezvousTimeoutError, match="Check that the launcher of machine 0 is running"):
        connect_in_time((NAME, port), SECRET, 0.1, lambda _: None)
