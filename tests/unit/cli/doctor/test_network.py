"""Connections that `paceline doctor` attempts between two machines."""

from __future__ import annotations

import socket
import threading

import pytest

from paceline.cli.doctor import Severity
from paceline.cli.doctor.network import PAYLOAD, probe, serve
from paceline.cli.main import main
from paceline.errors import AuthenticationError

SECRET = b"s" * 32


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: list[object] = []

        def wait() -> None:
            try:
                found.extend(serve(listener, SECRET))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        yield listener.getsockname(), found, thread
        thread.join(60)


def test_two_machines_see_each_other_both_ways(listening):
    address, found, thread = listening
    here = probe(address, SECRET)
    thread.join(60)
    assert [each.about for each in here] == ["there", "large packets", "back"]
    assert all(each.level is Severity.GOOD for each in here)
    assert f"{PAYLOAD >> 20} MiB each way at" in here[1].seen
    assert all(each.level is Severity.GOOD for each in found)


def test_a_doctor_of_somebody_else_is_refused(listening):
    address, found, thread = listening
    with pytest.raises(AuthenticationError):
        probe(address, b"x" * 32)
    thread.join(60)
    assert isinstance(found[0], AuthenticationError)


def test_nobody_there_is_bad():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    (finding,) = probe(address, SECRET)
    assert finding.level is Severity.BAD
    assert "firewall" in finding.reason


def test_a_damaged_token_is_told(capsys):
    assert main(["doctor", "--peer", "pl1-zzz"]) == 1
    assert "damaged or truncated" in capsys.readouterr().out
