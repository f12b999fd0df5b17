"""Tests of the network bridge: slow, lossy and silent networks."""

from __future__ import annotations

import hashlib
import socket
import time

import pytest

from hosts.talking import accept, await_word, connect, master, pair, rank, receive, say


def round_trip_ms(directory: str) -> float:
    with pair() as connection:
        say(directory, f"{rank()} connected")
        await_word(directory, "measure")
        if rank() == 0:
            connection.sendall(receive(connection, 1))
            return 0.0
        start = time.monotonic()
        connection.sendall(b"x")
        receive(connection, 1)
        return (time.monotonic() - start) * 1000


def speak_through_a_cut(directory: str) -> tuple[str, bytes]:
    """Returns the messages that a rank receives during and after the cut."""
    with pair() as connection:
        say(directory, f"{rank()} connected")
        await_word(directory, "cut")
        connection.sendall(b"from %d" % rank())
        connection.settimeout(0.4)
        try:
            during = f"heard {connection.recv(1)!r}"
        except OSError as error:
            during = type(error).__name__
        say(directory, f"{rank()} waited")
        connection.settimeout(30)
        return during, receive(connection, 6)


def connect_to_host_0(directory: str) -> str:
    if rank() == 0:
        accept(*master()).close()
        await_word(directory, "2 done")
        return "listened"
    await_word(directory, "cut")
    try:
        connect(*master(), timeout_s=20 if rank() == 1 else 1).close()
        return "connected"
    except OSError as error:
        return type(error).__name__
    finally:
        say(directory, f"{rank()} done")


def datagrams_that_arrive(number: int) -> int:
    with pair() as connection, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        if rank() == 1:
            receive(connection, 1)
            for _ in range(number):
                datagrams.sendto(b"x", master())
            connection.sendall(b"x")
            return 0
        datagrams.bind(master())
        connection.sendall(b"x")
        receive(connection, 1)  # over TCP and sent last, so all datagrams have arrived before it
        datagrams.setblocking(False)
        arrived = 0
        while True:
            try:
                datagrams.recv(1)
                arrived += 1
            except BlockingIOError:
                return arrived


def digest_of_what_passes(nbytes: int) -> str:
    data = bytes(range(256)) * (nbytes // 256)
    with pair() as connection:
        if rank() == 1:
            connection.sendall(data)
        else:
            data = receive(connection, nbytes)
    return hashlib.sha256(data).hexdigest()


def test_a_round_trip_takes_twice_the_delay(hosts, tmp_path):
    say(str(tmp_path), "measure")
    assert hosts(2, delay_ms=15)(round_trip_ms, str(tmp_path))[1] >= 30


def test_the_delay_changes_while_ranks_run(hosts, tmp_path):
    with hosts(2, bridged=True).start(round_trip_ms, str(tmp_path)) as world:
        await_word(str(tmp_path), "0 connected", "1 connected")
        world.delay_ms = 40
        say(str(tmp_path), "measure")
        assert world.join(60)[1] >= 80


@pytest.mark.parametrize("cut", ["cut", "cut_host"])
def test_behind_a_cut_there_is_silence_until_it_heals(hosts, tmp_path, cut):
    with hosts(2, bridged=True).start(speak_through_a_cut, str(tmp_path)) as world:
        await_word(str(tmp_path), "0 connected", "1 connected")
        world.cut(0, 1) if cut == "cut" else world.cut_host(1)
        say(str(tmp_path), "cut")
        await_word(str(tmp_path), "0 waited", "1 waited")
        world.heal()
        assert world.join(40) == [("TimeoutError", b"from 1"), ("TimeoutError", b"from 0")]


def test_only_the_host_that_is_cut_off_is_silent(hosts, tmp_path):
    with hosts(3, bridged=True).start(connect_to_host_0, str(tmp_path)) as world:
        world.cut_host(2)
        say(str(tmp_path), "cut")
        assert world.join(40) == ["listened", "connected", "TimeoutError"]


def test_some_packets_are_lost(hosts):
    arrived, _ = hosts(2, loss=0.3)(datagrams_that_arrive, 200)
    assert 0 < arrived < 200


def test_tcp_passes_whole_through_loss_and_without(hosts):
    for loss in (0.0, 0.02):
        sent, received = hosts(2, bridged=True, loss=loss)(digest_of_what_passes, 1 << 20)
        assert sent == received


def test_a_switch_does_not_take_the_orders_of_a_bridge(hosts):
    with hosts(2).start(rank) as world:
        with pytest.raises(ValueError, match=r"joined by a switch.*ask for hosts\(\.\.\., bridged=True\)"):
            world.cut(0, 1)
        world.join(60)
