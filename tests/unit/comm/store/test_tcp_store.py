"""TCP stores: connections between servers and clients, and their shutdown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from store_kinds import DEADLINE_S, exit_code

from paceline import Store, TCPStore
from paceline.comm.store.remote_store import RemoteStore, StoreServerLostError, connect
from paceline.errors import StoreConnectionError

pytestmark = pytest.mark.usefixtures("no_secret")


def test_clients_of_a_server_share_its_keys() -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert server.host == "localhost"
    assert server.port > 0
    client = TCPStore("localhost", server.port)
    client.set("key", b"value")
    assert server.get("key") == b"value"
    client.close()
    server.close()


def test_libuv_backend_is_the_argument() -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("localhost", server.port, use_libuv=False)
    assert (server.libuvBackend, client.libuvBackend) == (True, False), "as in torch"
    client.close()
    server.close()


@pytest.mark.parametrize("port", [-1, 65536, 70000])
@pytest.mark.parametrize("is_master", [False, True])
def test_a_port_that_does_not_exist_is_refused(port: int, is_master: bool) -> None:
    """Otherwise 70000 would be port 4464."""
    with pytest.raises(ValueError, match=f"port is {port}; it must be from 0 to 65535"):
        TCPStore("localhost", port, 1, is_master, wait_for_workers=False)


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
    with pytest.raises(TimeoutError, match="for 3 clients; 1 connected"):
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
        StoreConnectionError, match=rf"no store responded at 127.0.0.1:{port} after 0\.\d s and \d+ attempts; .*refused"
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


def test_closing_a_store_ends_its_search_for_the_server() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    is_gone, searches = threading.Event(), threading.Event()

    def dial(timeout_s: float) -> socket.socket:
        if is_gone.is_set():
            searches.set()
            raise ConnectionRefusedError
        return socket.create_connection(("127.0.0.1", server.port), timeout_s)

    store = RemoteStore(lambda is_wanted: connect(dial, "nowhere", None, DEADLINE_S, is_wanted), "a store")
    is_gone.set()
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(store.get, key) for key in ("never", "nor this")]  # the second needs a connection
        assert searches.wait(DEADLINE_S)
        store.close()
    told = [str(each.exception()) for each in waiting]
    assert sum("closed the store at nowhere while one of its threads connected" in text for text in told) == 1, told
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
            del server  # this runs the destructor in a process without the server's thread
            os._exit(0 if told else 1)
        os._exit(2)
    assert exit_code(child) == 0
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
