"""Unauthorized connections while a group forms and runs: two thousand in the suite, ten thousand at night."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import paceline as dist
from hosts.network import ipv4
from hosts.talking import await_word, rank, say
from paceline.comm.security.authenticated_listener import AuthenticatedListener

STRANGERS = 2_000
AT_NIGHT = pytest.param(10_000, marks=pytest.mark.soak)
COUNTS = pytest.mark.parametrize("strangers", [STRANGERS, AT_NIGHT])


def listening_ports(address: str) -> set[int]:
    packed = socket.inet_aton(address)[::-1].hex().upper()
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[1].startswith(packed)}


class Strangers:
    """Threads that repeatedly connect to a port, send data or nothing, and disconnect or stay connected."""

    def __init__(self, address: str, port: int, threads: int, most: int) -> None:
        self.count = 0
        self._place, self._most = (address, port), most
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._come, args=(seed, most // threads)) for seed in range(threads)]
        for thread in self._threads:
            thread.start()

    def _come(self, seed: int, times: int) -> None:
        chance = random.Random(seed)
        staying: list[socket.socket] = []
        for _ in range(times):
            if self._over.is_set():
                break
            with contextlib.suppress(OSError):
                connection = socket.create_connection(self._place, timeout=2)
                self.count += 1
                kind = chance.randrange(5)
                if kind == 0:
                    connection.sendall(chance.randbytes(200))
                elif kind == 1:
                    connection.sendall(b"paceln/1links".ljust(48, b"\0"))  # without a proof
                elif kind == 2:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                if kind == 3:
                    staying = [*staying[-50:], connection]
                else:
                    connection.close()
        for connection in staying:
            connection.close()

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def form_a_group_among_strangers(directory: str, most: int) -> int:
    dist.init_process_group(timeout=timedelta(seconds=100))
    address, store = ipv4(rank()), int(os.environ["MASTER_PORT"])
    seen = 0
    # The first rank's listener for links stays open until the last rank has connected.
    if rank() == 2:
        await_word(directory, "strangers are here", timeout_s=90)
    elif rank() == 0:
        forming = threading.Thread(target=_besiege, args=(directory, address, store, most))
        forming.start()
    group = dist.new_group()
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, group=group)
    assert (tensor == 3).all()
    if rank() == 0:
        forming.join()
        seen = int(Path(directory, "count").read_text())
    dist.barrier()
    dist.destroy_process_group()
    return seen


def _besiege(directory: str, address: str, store: int, most: int) -> None:
    while not (ports := listening_ports(address) - {store}):
        time.sleep(0.01)
    with Strangers(address, ports.pop(), 8, most) as strangers:
        deadline = time.monotonic() + 60
        while strangers.count < most * 0.9 and time.monotonic() < deadline:
            time.sleep(0.05)
        say(directory, "strangers are here")  # they stay connected while the last rank connects
        time.sleep(0.5)
    Path(directory, "count").write_text(str(strangers.count))


@COUNTS
def test_a_group_forms_among_strangers(hosts, tmp_path, strangers):
    assert hosts(3, 1)(form_a_group_among_strangers, str(tmp_path), strangers)[0] > strangers / 2


def work_among_strangers(most: int) -> int:
    dist.init_process_group(timeout=timedelta(seconds=100))
    seen = 0
    over = torch.zeros(1)
    strangers = contextlib.nullcontext()
    if rank() == 0:
        strangers = Strangers(ipv4(0), int(os.environ["MASTER_PORT"]), 8, most)
    with strangers as at_the_store:
        deadline = time.monotonic() + 60
        groups = 0
        while not over:
            tensor = torch.ones(50_000)
            dist.all_reduce(tensor)
            assert (tensor == 2).all()
            if groups < 5:  # a new group, whose links are announced through the store
                groups += 1
                group = dist.new_group()
                dist.barrier(group)
                dist.destroy_process_group(group)
            if at_the_store is not None:
                seen = at_the_store.count
                over.fill_(float(seen >= 0.95 * most or time.monotonic() > deadline))
            dist.broadcast(over, 0)
    dist.barrier()
    dist.destroy_process_group()
    return seen


@COUNTS
def test_a_job_goes_on_while_strangers_are_at_the_store(hosts, strangers):
    assert hosts(2, 1)(work_among_strangers, strangers)[0] > strangers / 2


def be_shown_out_at_first() -> None:
    if rank() == 0:
        shown_out: list[int] = []
        leave = AuthenticatedListener._leave

        def too_busy(keeper: AuthenticatedListener, number: int) -> bool:
            """Newer connections displace the first two connections just as the proofs from these two arrive."""
            welcome = leave(keeper, number)
            if welcome and keeper._channel == "links" and len(shown_out) < 2:
                shown_out.append(number)
                return False
            return welcome

        AuthenticatedListener._leave = too_busy
    dist.init_process_group(timeout=timedelta(seconds=30))
    dist.barrier()


def test_who_was_shown_out_by_a_crowd_comes_again(hosts):
    hosts(2, 1)(be_shown_out_at_first)
