"""Every store keeps the same promises."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from paceline import (
    AuthenticationError,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
    TCPStore,
)

SHORT = timedelta(seconds=0.2)


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request, tmp_path):
    kinds = {
        "hash": HashStore,
        "file": lambda: FileStore(tmp_path / "store", 1),
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True),
        "prefix": lambda: PrefixStore("a", PrefixStore("b", HashStore())),
    }
    made = kinds[request.param]()
    yield made
    made.close()


def test_values_are_set_got_and_deleted(store: Store):
    store.set("key", "text")
    store.set("bytes", b"\0\xff")
    assert store.get("key") == b"text"
    assert store.multi_get(["bytes", "key"]) == [b"\0\xff", b"text"]
    store.multi_set(["x", "y"], [b"1", "2"])
    store.append("x", "1")
    store.append("new", "n")
    assert store.multi_get(["x", "y", "new"]) == [b"11", b"2", b"n"]
    assert store.check(["x", "y"])
    assert not store.check(["x", "z"])
    before = store.num_keys()
    assert store.delete_key("x")
    assert not store.delete_key("x")
    assert store.num_keys() == before - 1
    assert store.has_extended_api()


def test_numbers_add_up_and_other_values_are_refused(store: Store):
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("word", "four")
    with pytest.raises(StoreError, match=r"refused add\('word'\).*not a number"):
        store.add("word", 1)


def test_compare_set_sets_only_what_was_expected(store: Store):
    assert store.compare_set("k", "expected", "new") == b"expected"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "wrong", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"


def test_queues_are_first_in_first_out(store: Store):
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q")] == [b"1", b"2"]
    assert store.queue_len("q") == 0
    with pytest.raises(StoreTimeoutError):
        store.queue_pop("q", block=False)


def test_a_wait_that_is_over_names_the_key_and_the_store(store: Store):
    store.set("there", "")
    with pytest.raises(StoreTimeoutError, match=r"waited 0\.\d s in .*Store.* never set: 'absent'") as caught:
        store.wait(["there", "absent"], SHORT)
    assert isinstance(caught.value, TimeoutError)
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    with pytest.raises(StoreTimeoutError):
        store.get("absent")


def test_a_waiter_is_woken_by_the_key(store: Store):
    threading.Timer(0.1, store.set, ("late", "value")).start()
    if isinstance(store, TCPStore):  # one connection asks one thing at a time
        other = TCPStore("127.0.0.1", store.port)
        assert other.get("late") == b"value"
    elif isinstance(store, FileStore):
        assert FileStore(store.path).get("late") == b"value"
    else:
        assert store.get("late") == b"value"


def test_clients_of_one_tcp_store_see_each_other():
    server = TCPStore("localhost", 0, world_size=3, is_master=True, wait_for_workers=False)
    others = [TCPStore("localhost", server.port, 3, wait_for_workers=False) for _ in range(2)]
    threads = [threading.Thread(target=lambda s=s: [s.add("n", 1) for _ in range(200)]) for s in (server, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert others[0].add("n", 0) == 600
    assert (server.host, others[0].port) == ("localhost", server.port)
    big = os.urandom(5 << 20)
    others[0].set("big", big)
    assert others[1].get("big") == big
    shared = TCPStore("localhost", server.port, is_master=True, multi_tenant=True)
    assert shared.add("n", 0) == 600
    server.close()
    with pytest.raises(StoreConnectionError, match="has ended"):
        others[0].get("n")


def test_ipv6_and_a_socket_of_the_callers():
    listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    store = TCPStore("::1", 0, is_master=True, master_listen_fd=listener.detach())
    assert TCPStore("::1", store.port).add("n", 1) == 1
    store.close()


def test_a_port_in_use_is_reported_with_its_holder():
    store = TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(StoreConnectionError, match=rf"port {store.port} .* in use by process {os.getpid()} "):
        TCPStore("127.0.0.1", store.port, is_master=True)


def test_nobody_there_is_told_with_place_time_and_attempts():
    with pytest.raises(StoreConnectionError, match=r"no store at 127\.0\.0\.1:1 after 0\.\d s and \d+ attempts.*refused"):
        TCPStore("127.0.0.1", 1, timeout=SHORT)


def test_without_a_secret_only_loopback_is_served(monkeypatch):
    monkeypatch.delenv("PACELINE_SECRET", raising=False)
    with pytest.raises(ValueError, match="has no secret.*PACELINE_SECRET"):
        TCPStore("0.0.0.0", 0, is_master=True)


def test_a_client_with_another_secret_is_refused_and_the_server_goes_on(monkeypatch, caplog):
    monkeypatch.setenv("PACELINE_SECRET", "a secret of this job")
    store = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("PACELINE_SECRET", "a secret of another job")
    with pytest.raises(AuthenticationError, match="does not hold this job's secret"):
        TCPStore("127.0.0.1", store.port)
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b" " * 64)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert store.add("n", 1) == 1
    assert "spoke another protocol" in caplog.text


def test_a_secret_file_that_others_can_read_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    monkeypatch.delenv("PACELINE_SECRET", raising=False)
    monkeypatch.setenv("PACELINE_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match="chmod 600"):
        TCPStore("127.0.0.1", 0, is_master=True)
    path.chmod(0o600)
    TCPStore("127.0.0.1", 0, is_master=True).close()


def test_a_file_left_by_an_earlier_run_is_started_anew(tmp_path):
    path = tmp_path / "store"
    code = f"from paceline import FileStore; FileStore({str(path)!r}, 1).set('old', 'run'); import os; os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert path.stat().st_size > 0
    first = FileStore(path, 2)
    second = FileStore(path, 2)
    assert not second.check(["old"])
    first.set("new", "run")
    assert second.get("new") == b"run"


def test_a_record_that_was_cut_off_is_dropped(tmp_path):
    one, two = FileStore(tmp_path / "store"), FileStore(tmp_path / "store")
    one.set("whole", "1")
    with Path(one.path).open("ab") as file:
        file.write(b"\x40\0\0\0half a rec")
    assert two.get("whole") == b"1"
    two.set("next", "2")
    assert one.get("next") == b"2"


def test_many_processes_share_a_file(tmp_path):
    code = f"from paceline import FileStore; s = FileStore({str(tmp_path / 'store')!r}); [s.add('n', 1) for _ in range(50)]"
    keep = FileStore(tmp_path / "store")
    children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [child.wait(30) for child in children] == [0, 0, 0]
    assert keep.add("n", 0) == 150


def test_a_server_whose_handshakes_stall_admits_others():
    store = TCPStore("127.0.0.1", 0, is_master=True)
    silent = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(20)]
    started = time.monotonic()
    TCPStore("127.0.0.1", store.port).set("k", "v")
    assert time.monotonic() - started < 4  # less than a stalled handshake's time-out
    for each in silent:
        each.close()
