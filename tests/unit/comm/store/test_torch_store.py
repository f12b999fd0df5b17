"""The store's server responds to PyTorch's clients as PyTorch's own server does, and resists strangers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from launching import wait_until

from paceline import _core

LONG, SHORT = timedelta(seconds=60), timedelta(milliseconds=100)
MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)
SET, GET, ADD, CHECK, WAIT, CANCEL_WAIT, PING = 1, 3, 4, 5, 6, 12, 13


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.getsockname()[1]
    server = _core.StoreServer(listener.detach())
    yield number
    server.close()


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, None, False, LONG)


def answers(port: int) -> dict[str, object]:
    """Returns a server's responses to each operation of PyTorch's client, including errors."""
    a, b = client(port), client(port)
    found: dict[str, object] = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            found[name] = call()
        except Exception as error:
            found[name] = type(error)

    note("set and get", lambda: (a.set("k", "v"), b.get("k")))
    note("add", lambda: [a.add("n", 5), b.add("n", -7), b.add("n", 1 << 40), b.get("n")])
    note("check", lambda: [a.check(["k"]), a.check(["k", "no"]), a.check([])])
    swaps = [("x", "y"), ("", "y"), ("n", "z"), ("y", "z")]
    note("compare_set", lambda: [a.compare_set("c", *each) for each in swaps])
    note("append", lambda: (a.append("ap", "1"), a.append("ap", "2"), b.get("ap")))
    note("several", lambda: (a.multi_set(["m1", "m2"], ["1", "2" * 100_000]), b.multi_get(["m1", "m2"])))
    note("count", a.num_keys)
    note("delete", lambda: [a.delete_key("k"), a.delete_key("k"), a.check(["k"])])
    note("a wait in vain", lambda: a.wait(["never"], SHORT))
    note("afterwards", lambda: a.get("c"))
    note("a get in vain", lambda: dist.TCPStore("127.0.0.1", port, None, False, SHORT).get("never"))
    with in_thread(lambda: (b.set("late", "L"), b.set("later", "M"))):
        note("a wait", lambda: (a.wait(["later", "late"], LONG), a.get("late")))
    note("a large value", lambda: (a.set("big", b"\0\1" * (3 << 20)), b.get("big") == b"\0\1" * (3 << 20)))
    note("a clone", lambda: dist.PrefixStore("p", a.clone()).set("k", b"\0") or b.get("p/k"))
    if hasattr(a, "queue_push"):
        note("a queue", lambda: (a.queue_push("q", "1"), a.queue_push("q", "2"), a.queue_len("q"), b.queue_pop("q")))
        note("its rest", lambda: (b.queue_pop("q"), a.queue_len("q"), a.queue_pop("q", block=False)))
        taken: list[bytes] = []
        with (
            in_thread(lambda: taken.append(b.queue_pop("q2"))),
            in_thread(lambda: taken.append(client(port).queue_pop("q2"))),
        ):
            a.queue_push("q2", "one")
            a.queue_push("q2", "two")
        note("two takers", lambda: sorted(taken))
    if hasattr(a, "list_keys"):
        note("keys", lambda: sorted(a.list_keys()))
    if hasattr(a, "barrier"):
        note("a barrier in vain", lambda: a.barrier("alone", 2, SHORT))
        with in_thread(lambda: b.barrier("both", 2, LONG)):
            note("a barrier", lambda: a.barrier("both", 2, LONG))
        note("the same again", lambda: (a.barrier("both", 2, LONG), a.get("both")))
    return found


@contextlib.contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()


def test_every_answer_is_that_of_torchs_server(port: int) -> None:
    theirs = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    expected = answers(theirs.port)
    assert expected["set and get"] == (None, b"v")
    assert answers(port) == expected


def text(word: bytes) -> bytes:
    return struct.pack("<Q", len(word)) + word


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 60)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        struct.pack("<BI", 0, 1),
        bytes([SET]) + text(b"k") + text(b"v"),
        MAGIC + MAGIC,
        MAGIC + b"\xff",
        MAGIC + bytes([SET]) + struct.pack("<Q", 1 << 60),
        MAGIC + bytes([SET]) + text(b"k") + struct.pack("<Q", (8 << 20) + 1),
        MAGIC + bytes([CHECK]) + struct.pack("<Q", 1 << 40),
        MAGIC + bytes([SET]) + text(b"w") + text(b"word") + bytes([ADD]) + text(b"w") + struct.pack("<q", 1),
        MAGIC
        + bytes([ADD])
        + text(b"n")
        + struct.pack("<q", 2**63 - 1)
        + bytes([ADD])
        + text(b"n")
        + struct.pack("<q", 1),
        MAGIC + bytes([WAIT]) + struct.pack("<Q", 1) + text(b"never") + bytes([GET]) + text(b"never"),
    ],
)
def test_what_is_no_query_ends_its_own_connection_only(port: int, garbage: bytes) -> None:
    good = client(port)
    good.set("k", "v")
    with connected(port) as stranger:
        stranger.sendall(garbage)
        if garbage.endswith(struct.pack("<q", 1)):
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(64):  # the sum from an earlier request
                pass
        else:
            assert is_closed(stranger)
    assert good.get("k") == b"v"


def test_a_query_may_come_byte_by_byte(port: int) -> None:
    query = MAGIC + bytes([SET]) + text(b"/slow") + text(b"loris") + bytes([PING]) + struct.pack("<I", 4711)
    with connected(port) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in query:
            slow.sendall(bytes([byte]))
        assert slow.recv(4) == struct.pack("<I", 4711)
    assert client(port).get("slow") == b"loris"


def test_a_wait_that_was_cancelled_takes_no_later_answer(port: int) -> None:
    with connected(port) as waiting:
        waiting.sendall(MAGIC + bytes([WAIT]) + struct.pack("<Q", 1) + text(b"/k") + bytes([CANCEL_WAIT]))
        assert waiting.recv(8) == b"\1"
        client(port).set("k", "v")
        waiting.sendall(bytes([GET]) + text(b"/k"))
        assert waiting.recv(64) == text(b"v")


def test_silent_and_lost_clients_delay_nobody(port: int) -> None:
    silent = [connected(port) for _ in range(50)]
    gone = connected(port)
    gone.sendall(MAGIC + bytes([WAIT]) + struct.pack("<Q", 1) + text(b"/k"))
    gone.close()
    good = client(port)
    good.set("k", "v")
    assert good.get("k") == b"v"
    for each in silent:
        each.close()


def test_the_end_of_the_server_ends_its_clients() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.getsockname()[1]
    server = _core.StoreServer(listener.detach())
    with connected(number) as waiting:
        waiting.sendall(MAGIC + bytes([WAIT]) + struct.pack("<Q", 1) + text(b"/k"))
        wait_until(lambda: client(number).check(["k"]) is False)
        server.close()
        assert is_closed(waiting)
    with pytest.raises(ConnectionRefusedError):
        connected(number)
