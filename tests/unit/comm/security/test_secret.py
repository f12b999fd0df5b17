"""The job's secret, the handshake, and a server with clients that do not have the secret."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from paceline import AuthenticationError, TCPStore
from paceline.comm.security import authenticated_listener
from paceline.comm.security.handshake import HandshakeUnfinishedError, PeerHello, prove, verify
from paceline.comm.security.secret import SecretFile, derive_key, job_secret, require_secret

SECRET = "0123456789abcdef0123456789abcdef"
KEY = derive_key(SECRET.encode(), "store")
DEADLINE_S = 20.0

pytestmark = pytest.mark.usefixtures("no_secret")


# The secret


def test_without_a_secret_there_is_none() -> None:
    assert job_secret() is None


def test_the_descriptor_precedes_the_variable_and_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("f" * 32 + "\n")
    file.chmod(0o600)
    monkeypatch.setenv("PACELINE_SECRET_FILE", str(file))
    assert job_secret() == b"f" * 32
    monkeypatch.setenv("PACELINE_SECRET", "v" * 32)
    assert job_secret() == b"v" * 32
    inherited = SecretFile.create(b"d" * 32)
    monkeypatch.setenv("PACELINE_SECRET_FD", str(inherited))
    assert [job_secret(), job_secret()] == [b"d" * 32] * 2  # read again each time, even if the descriptor is shared
    os.close(inherited.fd)
    assert job_secret() == b"v" * 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_others_can_read_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text("f" * 32)
    file.chmod(mode)
    monkeypatch.setenv("PACELINE_SECRET_FILE", str(file))
    with pytest.raises(ValueError, match=f"chmod 600 {file}"):
        job_secret()


def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "short")
    with pytest.raises(ValueError, match="has 5 bytes; it needs at least 16"):
        job_secret()


@pytest.mark.parametrize("secret", [" " * 40, "  short  ", "\n"])
def test_spaces_around_a_secret_do_not_count(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv("PACELINE_SECRET", secret)
    with pytest.raises(ValueError, match="it needs at least 16"):
        job_secret()


def test_a_secret_file_that_is_no_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path, said in (("missing", r"cannot be opened \(No such file"), (".", "is not a regular file")):
        monkeypatch.setenv("PACELINE_SECRET_FILE", str(tmp_path / path))
        with pytest.raises(ValueError, match=rf"\(PACELINE_SECRET_FILE\) {said}"):
            job_secret()


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretFile]:
    file = SecretFile.create(b"i" * 32)
    monkeypatch.setenv("PACELINE_SECRET_FD", str(file))
    yield file
    with contextlib.suppress(OSError):
        os.close(file.fd)


def _as_made_by(file: SecretFile, maker: int) -> str:
    return str(SecretFile(file.fd, file.inode, maker))


def test_a_child_without_the_descriptor_asks_its_maker(inherited: SecretFile) -> None:
    script = "import paceline.comm.security.secret as s; print(s.job_secret().decode())"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "i" * 32


def test_another_file_of_that_number_is_no_secret(
    inherited: SecretFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text("of everybody, and long enough")
    taken = os.open(other, os.O_RDONLY)
    os.dup2(taken, inherited.fd)
    os.close(taken)
    with pytest.raises(ValueError, match=f"is a different file, {other}.*pass_fds.*set PACELINE_SECRET"):
        job_secret()
    monkeypatch.setenv("PACELINE_SECRET", "v" * 32)
    assert job_secret() == b"v" * 32


def test_a_memory_file_of_another_job_is_no_secret(inherited: SecretFile) -> None:
    other = SecretFile.create(b"o" * 32)
    os.dup2(other.fd, inherited.fd)
    os.close(other.fd)
    with pytest.raises(ValueError, match="a different file, /memfd:paceline-secret"):
        job_secret()


def test_a_secret_whose_maker_has_ended_is_refused(inherited: SecretFile, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setenv("PACELINE_SECRET_FD", _as_made_by(inherited, ended.pid))
    os.close(inherited.fd)
    with pytest.raises(ValueError, match="this descriptor is closed; .* cannot be opened"):
        job_secret()


def test_nobody_can_change_an_inherited_secret(inherited: SecretFile) -> None:
    with pytest.raises(PermissionError):
        os.pwrite(inherited.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(inherited.fd, 0)


def test_a_broken_descriptor_variable_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SECRET_FD", "seven")
    with pytest.raises(ValueError, match="'seven'; it must be DESCRIPTOR:INODE:PID"):
        job_secret()


def test_keys_are_hkdf_and_differ_by_use() -> None:
    extracted = hmac.new(b"paceline/1", SECRET.encode(), hashlib.sha256).digest()
    assert hmac.new(extracted, b"store\x01", hashlib.sha256).digest() == KEY
    assert len({derive_key(SECRET.encode(), "mesh"), KEY, derive_key(None, "store")}) == 3


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.7", "fe80::1%eth0"])
def test_other_addresses_than_loopback_need_a_secret(address: str) -> None:
    with pytest.raises(ValueError, match="PACELINE_SECRET"):
        require_secret(address, None)
    require_secret(address, b"x" * 32)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1"])
def test_loopback_needs_none(address: str) -> None:
    require_secret(address, None)


def test_a_wide_bind_without_a_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="no secret"):
        TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)


# The handshake


def _both(client: Callable[[socket.socket], object], server: Callable[[socket.socket], object]) -> list[object]:
    ends = socket.socketpair()
    results: list[object] = [None, None]

    def run(at: int, side: Callable[[socket.socket], object]) -> None:
        try:
            results[at] = side(ends[at])
        except AuthenticationError as error:
            results[at] = error
        finally:
            ends[at].close()

    threads = [threading.Thread(target=run, args=each) for each in ((0, client), (1, server))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return results


def test_both_ends_with_the_key_agree() -> None:
    hello = PeerHello("store", 3, 9)
    proved, seen = _both(lambda s: prove(s, KEY, hello), lambda s: verify(s, KEY, "store", 9))
    assert (proved, vars(seen)) == (None, vars(hello))


def test_neither_end_accepts_another_key() -> None:
    client, server = _both(
        lambda s: prove(s, derive_key(b"another", "store"), PeerHello("store")), lambda s: verify(s, KEY, "store")
    )
    assert isinstance(client, AuthenticationError)
    assert not isinstance(client, HandshakeUnfinishedError)
    assert "does not hold this job's secret" in str(client)
    assert isinstance(server, AuthenticationError)


def test_a_client_that_goes_on_with_a_wrong_proof_is_refused() -> None:
    def client(connection: socket.socket) -> None:
        prove_first(connection, "store")
        connection.recv(48, socket.MSG_WAITALL)
        connection.sendall(os.urandom(32))
        connection.recv(1)

    server = _both(client, lambda s: verify(s, KEY, "store"))[1]
    assert "does not hold this job's secret" in str(server)


def test_a_proof_cannot_be_reflected() -> None:
    def client(connection: socket.socket) -> None:
        prove_first(connection, "store")
        answer = connection.recv(48, socket.MSG_WAITALL)
        connection.sendall(answer[16:])  # the server's own proof
        connection.recv(1)

    server = _both(client, lambda s: verify(s, KEY, "store"))[1]
    assert "does not hold this job's secret" in str(server)


@pytest.mark.parametrize(
    ("channel", "generation", "said"), [("mesh", 0, "a protocol other than"), ("store", 1, "generation 0")]
)
def test_another_service_or_generation_is_refused(channel: str, generation: int, said: str) -> None:
    server = _both(lambda s: prove(s, KEY, PeerHello("store")), lambda s: verify(s, KEY, channel, generation))[1]
    assert said in str(server)


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    sent: list[bytes] = []

    class Recorder:
        def __init__(self, connection: socket.socket) -> None:
            self._connection = connection

        def sendall(self, data: bytes) -> None:
            sent.append(data)
            self._connection.sendall(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self._connection, name)

    hello = PeerHello("store")
    seen = _both(lambda s: prove(Recorder(s), KEY, hello), lambda s: verify(s, KEY, "store"))[1]
    assert vars(seen) == vars(hello)

    def replay(connection: socket.socket) -> None:
        connection.sendall(b"".join(sent))
        connection.recv(64)

    assert isinstance(_both(replay, lambda s: verify(s, KEY, "store"))[1], AuthenticationError)


def test_silence_is_left_at_the_deadline_and_is_no_verdict() -> None:
    ends = socket.socketpair()
    for side in (
        lambda: verify(ends[0], KEY, "store", timeout_s=0.05),
        lambda: prove(ends[0], KEY, PeerHello("s"), 0.05),
    ):
        with pytest.raises(HandshakeUnfinishedError, match=r"in time|timed out"):
            side()


def test_slow_bytes_do_not_move_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.02):
            theirs.send(b"p")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(AuthenticationError):
        verify(ours, KEY, "store", timeout_s=0.3)
    stop.set()
    dripping.join(DEADLINE_S)


def prove_first(connection: socket.socket, channel: str) -> None:
    """Sends the first message of a client."""
    connection.sendall(b"paceln/1" + channel.encode().ljust(8, b"\0") + bytes(16) + os.urandom(16))


# A server among strangers


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.setenv("PACELINE_SECRET", SECRET)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))


def _stranger(server: TCPStore) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(DEADLINE_S)
    return connection


def _serves(server: TCPStore) -> bool:
    client = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=DEADLINE_S))
    served = client.add("n", 1) >= 1
    client.close()
    return served


def _is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: store\r\nUser-Agent: a browser\r\n\r\n",
        os.urandom(4096),
        b"\0" * 4096,
        b"\xff" * (1 << 20),
    ],
    ids=["http", "random", "zeros", "a megabyte"],
)
def test_garbage_is_refused_and_the_server_goes_on(server: TCPStore, data: bytes) -> None:
    with _stranger(server) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
        assert _is_closed(stranger)
    assert _serves(server)
    server.close()


def test_a_request_without_a_handshake_is_not_read(server: TCPStore) -> None:
    body = b"\x01" + bytes(8) + b"\x02\0\0\0" + b"\x03\0\0\0key" + b"\x05\0\0\0value"
    with _stranger(server) as stranger:
        stranger.sendall((len(body).to_bytes(4, "little") + body).ljust(44, b"\0"))
        assert _is_closed(stranger)
    assert not server.check(["key"])
    server.close()


def test_a_client_with_another_secret_is_told_at_once(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "another secret, as long as needed")
    with pytest.raises(AuthenticationError, match="all ranks need the same PACELINE_SECRET"):
        TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=DEADLINE_S))
    monkeypatch.setenv("PACELINE_SECRET", SECRET)
    assert _serves(server)
    server.close()


def test_those_who_say_nothing_keep_nobody_out(server: TCPStore) -> None:
    silent = [_stranger(server) for _ in range(authenticated_listener.MAX_HANDSHAKES + 40)]
    assert _serves(server)
    half = [_stranger(server) for _ in range(20)]
    for each in half:
        prove_first(each, "store")  # this client sends nothing more
    assert _serves(server)
    assert _is_closed(silent[0])
    for each in (*silent, *half):
        each.close()
    assert _serves(server)
    server.close()


def test_a_server_too_busy_for_one_handshake_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SECRET", SECRET)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def break_off_then_serve() -> None:
        listener.accept()[0].close()
        servers.append(
            TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        )

    servers: list[TCPStore] = []
    thread = threading.Thread(target=break_off_then_serve)
    thread.start()
    client = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=DEADLINE_S))
    assert client.add("n", 1) == 1
    thread.join(DEADLINE_S)
    servers[0].close()
