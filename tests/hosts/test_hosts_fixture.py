"""Tests of the `hosts` fixture: placement, isolation, connections, and cleanup."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import RankFailed

from hosts.network import ipv4, ipv6
from hosts.talking import accept, await_word, connect, master, pair, rank, receive, say

JOINED = pytest.mark.parametrize("bridged", [False, True], ids=["switch", "bridge"])


def place_of_this_rank(extra: str) -> tuple[str, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return (*(os.environ[name] for name in names), socket.gethostname(), extra)


def greet_over(address: str) -> str:
    if rank() == 0:
        with accept(address, master()[1]) as connection:
            connection.sendall(b"hello")
            return connection.getpeername()[0]
    with connect(address, master()[1]) as connection:
        return receive(connection, 5).decode()


def reach_abstract_sockets_and_loopback_of_rank_0(directory: str) -> list[str]:
    listeners = [socket.socket(socket.AF_UNIX), socket.socket()]
    addresses = ["\0paceline-test-of-hosts", ("127.0.0.1", 29500)]
    if rank() == 0:
        for listener, address in zip(listeners, addresses, strict=True):
            listener.bind(address)
            listener.listen()
        say(directory, "listening")
        await_word(directory, "1", "2")
        return []
    await_word(directory, "listening")
    outcomes = []
    for listener, address in zip(listeners, addresses, strict=True):
        try:
            listener.connect(address)
            outcomes.append("reached")
        except ConnectionRefusedError:
            outcomes.append("refused")
    say(directory, str(rank()))
    return outcomes


def seconds_to_receive(nbytes: int) -> float:
    with pair() as connection:
        if rank() == 1:
            connection.sendall(bytes(nbytes))
            return 0.0
        receive(connection, 1)
        start = time.monotonic()
        assert len(receive(connection, nbytes - 1)) == nbytes - 1
        return time.monotonic() - start


def interfaces_of_this_host() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def fail_on_rank_2() -> None:
    if rank() == 2:
        raise KeyError("the cause")
    time.sleep(300)


def sleep_in(directory: str) -> None:
    draft = Path(directory, f"{rank()}.tmp")
    draft.write_text(os.readlink("/proc/self/ns/net"))
    draft.rename(draft.with_suffix(".network"))
    time.sleep(300)


def networks_in(directory: Path, size: int) -> set[str]:
    await_word(str(directory), *(f"{rank}.network" for rank in range(size)), timeout_s=90)
    return {file.read_text() for file in directory.glob("*.network")}


def holders(networks: set[str]) -> set[str]:
    """Returns the processes, descriptors and mounts that keep one of these namespaces alive."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            links = [process / "ns/net", *(process / "fd").iterdir()]
            found |= {str(link) for link in links if os.path.islink(link) and _target(link) in networks}
            found |= {
                f"{process}: {line}"
                for line in (process / "mountinfo").read_text().splitlines()
                if any(network in line for network in networks)
            }
    return found


def _target(link: Path) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return None


def wait_until_nobody_holds(networks: set[str]) -> None:
    deadline = time.monotonic() + 60
    while left := holders(networks):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_each_rank_finds_its_place_on_a_host_of_its_own_name(hosts):
    assert hosts([2, 1])(place_of_this_rank, "x") == [
        ("0", "0", "3", "2", "10.77.0.1", "h0", "x"),
        ("1", "1", "3", "2", "10.77.0.1", "h0", "x"),
        ("2", "0", "3", "1", "10.77.0.1", "h1", "x"),
    ]


@JOINED
@pytest.mark.parametrize("address_of", [ipv4, ipv6], ids=["ipv4", "ipv6"])
def test_hosts_reach_one_another(hosts, bridged, address_of):
    assert hosts(2, bridged=bridged)(greet_over, address_of(0)) == [address_of(1), "hello"]


@JOINED
def test_a_second_network_is_reached_by_the_second_interface(hosts, bridged):
    assert hosts(2, networks=2, bridged=bridged)(greet_over, ipv4(0, network=1)) == [ipv4(1, network=1), "hello"]
    assert hosts(1, networks=2, bridged=bridged)(interfaces_of_this_host) == [{"lo", "eth0", "eth1"}]


def test_abstract_sockets_and_loopback_reach_the_same_host_only(hosts, tmp_path):
    told = hosts([2, 1])(reach_abstract_sockets_and_loopback_of_rank_0, str(tmp_path))
    assert told[1:] == [["reached", "reached"], ["refused", "refused"]]


@JOINED
def test_no_more_passes_than_the_rate(hosts, bridged):
    nbytes, buckets = 1 << 22, 1 << 19
    seconds, _ = hosts(2, rate="100mbit", bridged=bridged)(seconds_to_receive, nbytes)
    assert seconds > (nbytes - buckets) * 8 / 100e6


def test_a_failing_rank_is_named(hosts):
    with pytest.raises(RankFailed, match=r"rank 2 failed:\nTraceback(?s:.*)KeyError: 'the cause'"):
        hosts(2, 2)(fail_on_rank_2)


def test_a_killed_rank_is_named(hosts, tmp_path):
    with hosts(2, 1).start(sleep_in, str(tmp_path)) as world:
        networks_in(tmp_path, 2)
        world.kill(1)
        with pytest.raises(RankFailed, match="rank 1 died with exit code -9"):
            world.join(60)


@JOINED
def test_a_world_that_is_left_leaves_nothing(hosts, bridged, tmp_path):
    with hosts(2, 1, bridged=bridged).start(sleep_in, str(tmp_path)) as world:
        networks = networks_in(tmp_path, 2)
        assert len(networks) == 2 and holders(networks)
        assert os.readlink("/proc/self/ns/net") not in networks
    wait_until_nobody_holds(networks)
    world.close()


def test_a_failing_set_up_leaves_nothing(hosts):
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="tc failed:(?s:.*)rate 0mbit"):
        hosts(2, rate="0mbit").start(interfaces_of_this_host)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_killed_test_run_leaves_nothing(hosts, tmp_path):
    code = (
        f"import sys, time; sys.path[:0] = {sys.path}\n"
        "from hosts.fixture import Hosts; from hosts.test_hosts_fixture import sleep_in\n"
        "from forking import context; context.set_forkserver_preload(['torch'])\n"
        f"world = Hosts(2, bridged=True).start(sleep_in, {str(tmp_path)!r}); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as run:
        try:
            networks = networks_in(tmp_path, 2)
        finally:
            run.send_signal(signal.SIGKILL)
    wait_until_nobody_holds(networks)
