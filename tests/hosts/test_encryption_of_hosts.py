"""Data that can be captured between hosts, and failure detection over encrypted connections."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta

import pytest
import torch

import paceline as dist
from hosts.capture import Capture
from hosts.network import ipv4
from hosts.telling import SOON_S, told_by, world
from hosts.test_losses_of_hosts import wait_for_the_dead
from paceline.comm.group.default import own_world

TENSOR, MESSAGE, OBJECT = b"bytes-of-a-tensor", b"bytes-of-a-message", b"text-of-an-object"
NAME, VALUE = b"name-of-a-key", b"value-of-a-key"
WORDS = (TENSOR, MESSAGE, OBJECT, NAME, VALUE)


def tensor_of(word: bytes, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(word * (nbytes // len(word))), dtype=torch.uint8)


def exchange_secrets() -> None:
    store = own_world().store
    if dist.get_rank() == 0:
        store.set(NAME.decode(), VALUE)
    assert store.get(NAME.decode()) == VALUE
    expected = tensor_of(TENSOR, 1 << 20)
    tensor = expected.clone() if dist.get_rank() == 0 else torch.empty_like(expected)
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, expected)
    message = tensor_of(MESSAGE, 10_000)
    if dist.get_rank() == 0:
        dist.send(message, 1)
    else:
        received = torch.empty_like(message)
        dist.recv(received, 0)
        assert torch.equal(received, message)
    objects = [OBJECT.decode() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [OBJECT.decode()]
    dist.barrier()


def exchange_secrets_under_capture(level: str) -> list[str]:
    with Capture() as capture:
        dist.init_process_group(security=level, timeout=timedelta(seconds=30))
        exchange_secrets()
        dist.destroy_process_group()
    assert capture.nbytes > 1 << 20
    return capture.seen(WORDS)


def test_an_encrypted_job_shows_a_listener_nothing(hosts):
    """The same listener can read all data of a job that is authenticated but not encrypted."""
    assert hosts(2, 1)(exchange_secrets_under_capture, "auth")[0] == [word.decode() for word in WORDS]
    assert hosts(2, 1)(exchange_secrets_under_capture, "encrypt") == [[], []]


def exchange_secrets_between_public_addresses() -> list[str]:
    own = f"11.0.0.{int(os.environ['RANK']) + 1}"
    subprocess.run(["ip", "addr", "add", f"{own}/24", "dev", "eth0"], check=True)
    with Capture() as capture:
        dist.init_process_group(interface=own, timeout=timedelta(seconds=30))
        exchange_secrets()
        dist.destroy_process_group()
    assert capture.nbytes > 1 << 20
    return capture.seen(WORDS)


def test_lanes_between_public_addresses_are_encrypted(hosts):
    """The store, at a private address, is not encrypted, because this was not requested."""
    assert hosts(2, 1)(exchange_secrets_between_public_addresses)[0] == [NAME.decode(), VALUE.decode()]


@pytest.fixture
def encrypted(monkeypatch):
    monkeypatch.setenv("PACELINE_SECURITY", "encrypt")


@pytest.mark.parametrize("call", ["all_reduce", "recv, async"])
def test_a_killed_rank_is_named_under_encryption_too(hosts, encrypted, call):
    with hosts([1, 2]).start(wait_for_the_dead, call) as run:
        told = run.join(60, expect_dead={1})
    for number in (0, 2):
        error, message, took_s = told[number]
        assert error == "PeerLostError" and took_s < SOON_S, (took_s, message)
        assert message.startswith(f"rank 1 (h1, pid {run.pids[1]}) died, detected by rank ")


def end_while_the_other_waits(how: str) -> tuple[str, str, float]:
    dist.init_process_group(timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        dist.barrier()
        dist.destroy_process_group() if how == "leave" else world().abort()
        return "", "", 0.0

    def call() -> None:
        dist.barrier()  # the other rank may leave the barrier first
        while True:
            dist.all_reduce(torch.ones(1_000_000))

    return told_by(call)


def test_a_leave_is_told_from_a_death_under_encryption(hosts, encrypted):
    error, message, _ = hosts(2, 1)(end_while_the_other_waits, "leave")[0]
    assert error == "PeerLostError" and " left the group" in message and "died" not in message


def test_an_abort_reaches_the_others_under_encryption(hosts, encrypted):
    assert "aborted" in hosts(2, 1)(end_while_the_other_waits, "abort")[0][1]


def fork_in_the_middle() -> None:
    dist.init_process_group(timeout=timedelta(seconds=30))
    for turn in range(4):
        child = os.fork() if turn == 1 else None
        if child == 0:
            os._exit(0)
        tensor = torch.full((100_000,), float(turn))
        dist.all_reduce(tensor)
        assert (tensor == 2 * turn).all()
        if child is not None:
            os.waitpid(child, 0)
    dist.destroy_process_group()


def test_a_child_does_not_disturb_encrypted_lanes(hosts, encrypted):
    hosts(2, 1)(fork_in_the_middle)


def test_what_launchers_say_is_encrypted_too(machines):
    """The rendezvous connection carries reports and orders that contain the machines' addresses and the job's name."""
    here = machines(2)
    words = (b"a-job-of-ours", b"MASTER", ipv4(0).encode())
    seen = {}
    for level in ("auth", "encrypt"):
        capture = here.network.inside[1].run(Capture)
        try:
            flags = ("--security", level, "--rdzv-id", "a-job-of-ours")
            launchers = [here.elastic(host, "2", *flags) for host in range(2)]
            here.wait_for(2)
            here.say("end")
            for launcher in launchers:
                here.expect(launcher, 0)
        finally:
            capture.close()
        assert capture.nbytes > 1000
        seen[level] = capture.seen(words)
        for left in ("log", "end"):
            (here.directory / left).unlink()
    assert "a-job-of-ours" in seen["auth"]
    assert seen["encrypt"] == []
