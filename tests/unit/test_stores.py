"""Every kind of store keeps the same promises."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from paceline import FileStore, HashStore, PrefixStore, Store, TCPStore
from paceline.errors import StoreConnectionError, StoreError, StoreTimeoutError
from paceline.store.remote import StoreServerLostError, connect_unix
from paceline.store.server import StoreServer

SHORT = timedelta(milliseconds=50)
DEADLINE_S = 20
SECRET = b"a secret of this test, long enough"


def _tcp(_: Path) -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _unix(directory: Path) -> Store:
    server = StoreServer.on_unix_path(str(directory / "store"), SECRET)
    store = connect_unix(str(directory / "store"), SECRET)
    store.server = server
    return store


KINDS: dict[str, Callable[[Path], Store]] = {
    "hash": lambda _: HashStore(),
    "file": lambda directory: FileStore(directory / "store"),
    "tcp": _tcp,
    "unix": _unix,
    "prefix of tcp": lambda directory: PrefixStore("a", PrefixStore("b", _tcp(directory))),
    "prefix of file": lambda directory: PrefixStore("a", FileStore(directory / "store")),
}


@pytest.fixture(params=list(KINDS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = KINDS[request.param](tmp_path)
    made.set_timeout(timedelta(seconds=DEADLINE_S))
    yield made
    made.close()
    if hasattr(made, "server"):
        made.server.close()


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_SECRET", "PACELINE_SECRET_FD", "PACELINE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_values_are_bytes_and_strings_are_encoded(store: Store) -> None:
    store.set("text", "grün")
    store.set("bytes", b"\0\xff")
    store.set("empty", b"")
    assert store.multi_get(["bytes", "text", "empty"]) == [b"\0\xff", "grün".encode(), b""]


@pytest.mark.parametrize("value", [3, None, ["a"]])
def test_other_values_are_refused(store: Store, value: object) -> None:
    with pytest.raises(TypeError, match="bytes or str"):
        store.set("key", value)


def test_a_string_is_not_a_list_of_keys(store: Store) -> None:
    with pytest.raises(TypeError, match="list of keys"):
        store.wait("key")


def test_add_counts_in_decimal(store: Store) -> None:
    assert store.add("n", 0) == 0
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42


def test_add_to_what_is_no_number_is_refused_and_changes_nothing(store: Store) -> None:
    store.set("name", "paceline")
    with pytest.raises(StoreError, match=r"add\('name'\).*not a number"):
        store.add("name", 1)
    assert store.get("name") == b"paceline"


def test_add_beyond_64_bits_is_refused(store: Store) -> None:
    store.set("n", str(2**63 - 1))
    with pytest.raises(StoreError, match="64 bits"):
        store.add("n", 1)


def test_compare_set_changes_only_what_is_expected(store: Store) -> None:
    assert store.compare_set("key", "old", "new") == b"old"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.get("key") == b"second"


def test_keys_are_deleted_and_counted(store: Store) -> None:
    before = store.num_keys()
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.num_keys() == before + 2
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert store.check(["b"])
    assert not store.check(["a", "b"])
    assert store.num_keys() == before + 1


def test_multi_set_needs_a_value_for_each_key(store: Store) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])
    assert not store.check(["a"])


def test_append_makes_or_lengthens_a_value(store: Store) -> None:
    store.append("log", "one ")
    store.append("log", b"two")
    assert store.get("log") == b"one two"
    assert store.has_extended_api()


def test_queues_are_first_in_first_out(store: Store) -> None:
    assert store.queue_len("q") == 0
    for each in ("1", "2", "3"):
        store.queue_push("q", each)
    assert store.queue_len("q") == 3
    assert [store.queue_pop("q") for _ in range(3)] == [b"1", b"2", b"3"]
    with pytest.raises(StoreTimeoutError, match="'q'"):
        store.queue_pop("q", block=False)


def test_a_wait_that_ends_names_the_missing_keys(store: Store) -> None:
    store.set("here", b"")
    with pytest.raises(StoreTimeoutError, match=r"never set: 'gone', 'away'\.") as error:
        store.wait(["here", "gone", "away"], SHORT)
    assert isinstance(error.value, TimeoutError)
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    with pytest.raises(StoreTimeoutError, match="'gone'"):
        store.get("gone")


def test_a_thread_that_waits_is_woken_and_holds_up_no_other(store: Store) -> None:
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(store.get("late"))) for _ in range(3)]
    threads += [threading.Thread(target=lambda: got.append(store.queue_pop("queue")))]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    started = time.monotonic()
    store.set("late", b"come")
    store.queue_push("queue", b"come")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert got == [b"come"] * 4
    assert time.monotonic() - started < DEADLINE_S / 2


def test_threads_add_without_losing_one(store: Store) -> None:
    threads = [threading.Thread(target=lambda: [store.add("n", 1) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert store.add("n", 0) == 200


def test_large_values_come_back_whole(store: Store) -> None:
    value = os.urandom(1 << 20) * 8
    store.set("large", value)
    assert store.get("large") == value


def test_a_prefix_is_a_name_space_of_the_store_below() -> None:
    below = HashStore()
    store = PrefixStore("run", below)
    store.multi_set(["a", "b"], ["1", "2"])
    store.queue_push("q", "3")
    assert below.multi_get(["run/a", "run/b"]) == [b"1", b"2"]
    assert below.queue_pop("run/q") == b"3"
    with pytest.raises(StoreTimeoutError, match="never set: 'c'"):
        store.wait(["a", "c"], SHORT)


# TCP


def test_clients_of_a_server_share_its_keys() -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert server.host == "localhost"
    assert server.port > 0
    client = TCPStore("localhost", server.port)
    client.set("key", b"value")
    assert server.get("key") == b"value"
    client.close()
    server.close()


def test_ipv6_serves() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        store = TCPStore("::1", 0, is_master=True, wait_for_workers=False)
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    assert TCPStore("::1", store.port).add("n", 1) == 1
    store.close()


def test_the_master_waits_for_its_workers() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    joined: list[Store] = []
    worker = threading.Thread(target=lambda: joined.append(TCPStore("127.0.0.1", port, 2)))
    worker.start()
    store = TCPStore("127.0.0.1", port, 2, is_master=True, master_listen_fd=listener.detach())
    worker.join(DEADLINE_S)
    assert len(joined) == 1
    store.close()


def test_workers_that_do_not_come_are_counted() -> None:
    with pytest.raises(TimeoutError, match="for 3 clients; 1 came"):
        TCPStore("127.0.0.1", 0, 3, is_master=True, timeout=timedelta(seconds=0.3))


def test_a_port_in_use_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            StoreConnectionError, match=rf"port {port} of 127.0.0.1 is in use by process {os.getpid()} \("
        ):
            TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def test_tenants_of_one_process_share_a_server() -> None:
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    second = TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    first.set("key", b"shared")
    assert second.get("key") == b"shared"
    second.close()
    assert first.get("key") == b"shared"
    first.close()


def test_nobody_there_is_said_with_host_time_and_attempts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(
        StoreConnectionError, match=rf"no store at 127.0.0.1:{port} after 0\.\d s and \d+ attempts; .*refused"
    ):
        TCPStore("127.0.0.1", port, timeout=timedelta(seconds=0.3))


def test_a_late_server_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    servers: list[Store] = []

    def serve() -> None:
        servers.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    timer = threading.Timer(0.3, serve)
    timer.start()
    client = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=DEADLINE_S))
    assert client.add("n", 1) == 1
    timer.join()
    servers[0].close()


def test_threads_that_end_a_server_at_once_all_return() -> None:
    for _ in range(30):
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        start = threading.Barrier(4)

        def end(server: TCPStore = server, start: threading.Barrier = start) -> None:
            start.wait(DEADLINE_S)
            server.close()

        threads = [threading.Thread(target=end, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)


def test_a_server_that_ends_is_said_to_have_ended() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port)
    threading.Timer(0.1, server.close).start()
    with pytest.raises(StoreConnectionError, match="closed the connection"):
        client.get("never")
    server.close()


def test_a_server_that_dies_is_told_from_one_that_ends() -> None:
    program = (
        "import os, sys\nfrom paceline import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\nsys.stdin.read(1)\nos._exit(1)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin and server.stdout
        client = TCPStore("127.0.0.1", int(server.stdout.readline()))
        client.set("key", "value")
        threading.Timer(0.1, server.stdin.close).start()
        with pytest.raises(StoreServerLostError, match="lost its server in get: the process that served it has died"):
            client.get("never")


@pytest.mark.parametrize("kind", ["tcp", "prefix of tcp", "unix", "file"])
def test_the_last_will_of_a_connection_is_done_when_it_ends(kind: str, tmp_path: Path) -> None:
    store = KINDS[kind](tmp_path)
    tail = store
    while isinstance(tail, PrefixStore):
        tail = tail.underlying_store
    address = ("127.0.0.1", tail.port) if isinstance(tail, TCPStore) else None

    def another() -> Store:
        if kind == "file":
            return FileStore(tmp_path / "store")
        other = TCPStore(*address) if address else connect_unix(str(tmp_path / "store"), SECRET)
        return PrefixStore("a", PrefixStore("b", other)) if kind.startswith("prefix") else other

    for taken_back in (True, False):
        testator = another()
        testator.set_last_will("will", "the last")
        if taken_back:
            testator.set_last_will("will", None)
        testator.close()
        if taken_back:
            with pytest.raises(StoreTimeoutError):
                store.wait(["will"], SHORT)
        else:
            store.wait(["will"], timedelta(seconds=DEADLINE_S))
            assert store.get("will") == b"the last"
    store.close()
    if kind == "unix":
        store.server.close()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_each_key_has_a_last_will_of_its_own(kind: str, tmp_path: Path) -> None:
    store = KINDS[kind](tmp_path)
    testator = TCPStore("127.0.0.1", store.port) if isinstance(store, TCPStore) else FileStore(tmp_path / "store")
    for key in ("one", "two", "three"):
        testator.set_last_will(key, f"of {key}")
    testator.set_last_will("two", None)
    testator.close()
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    assert store.multi_get(["one", "three"]) == [b"of one", b"of three"]
    assert not store.check(["two"])
    store.close()


def test_a_hash_store_keeps_no_last_will() -> None:
    store = HashStore()
    store.set_last_will("will", "the last")
    store.close()
    assert not store.check(["will"])


def test_a_store_closed_here_says_so_and_wakes_its_waiters() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port)
    threading.Timer(0.1, client.close).start()
    with pytest.raises(StoreConnectionError):
        client.get("never")
    with pytest.raises(StoreConnectionError, match="was closed by this process"):
        client.add("n", 1)
    client.close()
    server.close()


def test_a_forked_child_may_not_use_the_connection() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    child = os.fork()
    if child == 0:
        try:
            server.add("n", 1)
        except StoreConnectionError as error:
            told = "forked child" in str(error)
            server.close()
            del server  # takes the server apart in a process without its thread
            os._exit(0 if told else 1)
        os._exit(2)
    assert _exit_code(child) == 0
    assert server.add("n", 1) == 1
    server.close()


def test_keyboard_interrupt_ends_a_wait() -> None:
    script = (
        "import paceline, sys\n"
        "store = paceline.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print('waiting', flush=True)\n"
        "store.get('never')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=DEADLINE_S)
    assert b"KeyboardInterrupt" in told


# Files


def test_a_file_left_by_an_earlier_run_is_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "store"
    earlier = FileStore(path)
    assert earlier.path == str(path)
    earlier.set("stale", b"yes")
    earlier.close()
    assert path.stat().st_size > 0
    later = FileStore(path)
    assert not later.check(["stale"])
    later.close()


def test_a_file_of_a_killed_process_is_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "store"
    script = (
        "import paceline, sys, time\n"
        f"store = paceline.FileStore({str(path)!r})\n"
        "store.set('stale', 'yes')\n"
        "print('set', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    other = FileStore(path)
    assert other.check(["stale"])  # its member lives
    other.close()
    process.kill()
    process.wait(DEADLINE_S)
    process.stdout.close()
    store = FileStore(path)
    assert not store.check(["stale"])
    store.close()


def test_half_a_record_of_a_killed_writer_is_dropped(tmp_path: Path) -> None:
    first, second = FileStore(tmp_path / "store"), FileStore(tmp_path / "store")
    first.set("whole", b"1")
    with open(tmp_path / "store", "ab") as file:
        file.write(b"\x40\0\0\0 half a record")
    second.set("after", b"2")
    assert first.multi_get(["whole", "after"]) == [b"1", b"2"]


def test_a_file_removed_in_use_is_noticed(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    (tmp_path / "store").unlink()
    with pytest.raises(StoreError, match="was removed while"):
        store.set("key", b"")


def test_a_forked_child_has_a_file_of_its_own(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", 2)
    child = os.fork()
    if child == 0:
        for _ in range(100):
            store.add("n", 1)
        os._exit(0)
    for _ in range(100):
        store.add("n", 1)
    assert _exit_code(child) == 0
    assert store.get("n") == b"200"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"directory of .* does not exist"):
        FileStore(tmp_path / "no" / "store")


def test_a_closed_file_says_so(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="was closed"):
        store.num_keys()


def _exit_code(child: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL
