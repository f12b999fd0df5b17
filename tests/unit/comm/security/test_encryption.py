"""Selection of encrypted connections, and access through listeners that require encryption."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.comm.security import encryption, handshake
from paceline.comm.security.authenticated_listener import AuthenticatedListener
from paceline.comm.security.encryption import EncryptedSocket
from paceline.comm.security.handshake import HandshakeUnfinishedError, PeerHello, encrypt_as_client, prove
from paceline.comm.security.secret import (
    choose_level,
    chosen_level,
    derive_key,
    job_secret,
    must_encrypt,
    require_secret,
)
from paceline.errors import AuthenticationError

SECRET = b"s" * 32

CHANNEL = "test"


@pytest.mark.parametrize(
    ("here", "there", "level", "expected"),
    [
        ("10.0.0.1", "10.0.0.2", None, False),
        ("10.0.0.1", "10.0.0.2", "encrypt", True),
        ("10.0.0.1", "10.0.0.2", "auth", False),
        ("192.168.0.1", "100.64.3.4", None, False),  # a provider's NAT
        ("169.254.0.1", "169.254.0.2", None, False),
        ("fd00::1", "fd00::2", None, False),
        ("fe80::1%eth0", "fe80::2%eth0", None, False),
        ("10.0.0.1", "8.8.8.8", None, True),
        ("8.8.8.8", "10.0.0.1", None, True),  # both ends must make the same decision
        ("2606:4700::1", "2606:4700::2", None, True),
        ("::ffff:8.8.8.8", "::ffff:8.8.4.4", None, True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", None, False),
        ("10.0.0.1", "8.8.8.8", "auth", False),
        ("10.0.0.1", "8.8.8.8", "none", False),
        ("127.0.0.1", "127.0.0.2", "encrypt", False),
        ("::1", "::1", "encrypt", False),
        ("10.0.0.1", "10.0.0.1", "encrypt", False),  # the machine's own address, so not between machines
        ("8.8.8.8", "8.8.8.8", None, False),
    ],
)
def test_the_level_and_the_addresses_decide(here, there, level, expected):
    assert must_encrypt(here, there, level) is expected


def test_a_level_must_be_one_of_three(monkeypatch):
    monkeypatch.setenv("PACELINE_SECURITY", "tls")
    with pytest.raises(ValueError, match="PACELINE_SECURITY is 'tls'; it must be one of auth, encrypt, none"):
        chosen_level()
    monkeypatch.setenv("PACELINE_SECURITY", "auth")
    with pytest.raises(ValueError, match="'encrypt' here and 'auth' in PACELINE_SECURITY"):
        choose_level("encrypt")


def test_none_is_for_loopback_unless_insisted_on(monkeypatch):
    monkeypatch.setenv("PACELINE_SECURITY", "none")
    monkeypatch.setenv("PACELINE_SECRET", "x" * 32)
    monkeypatch.delenv("PACELINE_INSECURE", raising=False)
    assert job_secret() is None
    require_secret("127.0.0.1", None)
    with pytest.raises(ValueError, match=r"10\.0\.0\.1 can be reached.*--insecure"):
        require_secret("10.0.0.1", None)
    monkeypatch.setenv("PACELINE_INSECURE", "1")
    require_secret("10.0.0.1", None)


class Door:
    """A listener on loopback, in place of one at another machine's address."""

    def __init__(self) -> None:
        self.admitted: list[encryption.Connection] = []
        self.came = threading.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        self.keeper = AuthenticatedListener(listener, derive_key(SECRET, CHANNEL), CHANNEL, self._admit, secret=SECRET)

    def _admit(self, connection, _hello):
        self.admitted.append(connection)
        self.came.set()

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.keeper.port), timeout=60)
        connection.settimeout(10)
        return connection

    def close(self) -> None:
        self.keeper.close()
        for connection in self.admitted:
            connection.close()


@pytest.fixture
def door(monkeypatch):
    monkeypatch.setattr(handshake, "must_encrypt", lambda here, there, level: True)
    here = Door()
    yield here
    here.close()


def test_members_talk_encrypted(door):
    with encrypt_as_client(door.connect(), SECRET, 5.0) as mine:
        assert isinstance(mine, EncryptedSocket)
        prove(mine, derive_key(SECRET, CHANNEL), PeerHello(CHANNEL))
        assert door.came.wait(60)
        theirs = door.admitted[0]
        mine.settimeout(10)
        sent = os.urandom(100_000)
        writing = threading.Thread(target=theirs.sendall, args=(sent,))
        writing.start()
        received = b""
        while len(received) < len(sent):
            received += mine.recv(65536)
        writing.join()
        assert received == sent
        with pytest.raises(TimeoutError):
            mine.settimeout(0.05)
            mine.recv(1)
        with pytest.raises(BlockingIOError):
            encryption.receive_now(mine, 1)
        theirs.close()
        mine.settimeout(10)
        assert mine.recv(1) == b""


def test_another_secret_is_refused_at_once(door):
    with door.connect() as plain, pytest.raises(AuthenticationError, match="does not hold this job's secret"):
        encrypt_as_client(plain, b"x" * 32, 5.0)
    assert not door.admitted


def test_a_plain_member_learns_what_is_missing(door, caplog):
    with door.connect() as plain, caplog.at_level(logging.WARNING):
        with pytest.raises(AuthenticationError, match="accepts only encrypted connections.*--security encrypt"):
            prove(plain, derive_key(SECRET, CHANNEL), PeerHello(CHANNEL))
        assert plain.recv(1) == b""
    assert "connected without encryption" in caplog.text


def test_the_proof_is_required_inside_tls_too(door):
    with (
        encrypt_as_client(door.connect(), SECRET, 5.0) as mine,
        pytest.raises((AuthenticationError, HandshakeUnfinishedError)),
    ):
        prove(mine, derive_key(b"x" * 32, CHANNEL), PeerHello(CHANNEL))
    assert not door.admitted


def hang_up(connection: socket.socket) -> None:
    """Waits until the other end has closed or reset the connection."""
    try:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    except TimeoutError:
        raise AssertionError("the door stayed open for a stranger") from None
    except OSError:  # the connection was reset
        pass


@settings(max_examples=examples(40), deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_garbage_that_looks_like_tls_is_refused(garbage, has_version):
    here = Door()
    try:
        with here.connect() as stranger:
            stranger.sendall(b"\x16" + (b"\x03\x01" if has_version else b"") + garbage)
            hang_up(stranger)
        assert not here.admitted
        with here.connect() as mine:  # other clients are still admitted
            prove(mine, derive_key(SECRET, CHANNEL), PeerHello(CHANNEL))
            assert here.came.wait(60)
    finally:
        here.close()


def test_openssl_sees_tls_1_3_and_asks_for_a_certificate(door):
    """A Python client without a certificate is rejected, although it accepts any server."""
    ssl = pytest.importorskip("ssl")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with door.connect() as plain, context.wrap_socket(plain) as stranger:
        assert stranger.version() == "TLSv1.3"
        with pytest.raises(OSError, match="certificate required|alert|reset|EOF"):
            stranger.sendall(b"x" * 100)
            stranger.recv(1)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with door.connect() as plain, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(plain)
    assert not door.admitted


def test_a_forked_child_does_not_disturb_the_connection(door):
    with encrypt_as_client(door.connect(), SECRET, 5.0) as mine:
        prove(mine, derive_key(SECRET, CHANNEL), PeerHello(CHANNEL))
        assert door.came.wait(60)
        child = os.fork()
        if child == 0:
            mine.close()
            del mine
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        mine.sendall(b"still here")
        door.admitted[0].settimeout(10)
        assert door.admitted[0].recv(100) == b"still here"


def test_encrypt_without_a_level_of_ours_is_an_error_of_flags():
    command = [sys.executable, "-m", "paceline", "run", "--security", "tls", "x.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "'tls' (choose from" in ended.stderr
