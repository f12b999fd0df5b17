"""Without free descriptors, the core raises an OSError and leaks nothing."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import paceline as dist
from paceline import _core


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    while held[-1] < max(map(int, os.listdir("/proc/self/fd"))) - 1:
        held.append(os.dup(0))  # until no lower number is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1 + number, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        for descriptor in held:
            os.close(descriptor)


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def await_end(connection: socket.socket) -> None:
    """Waits until the core has closed a descriptor that it took over, possibly after a farewell message."""
    connection.settimeout(10)
    while connection.recv(1024):
        pass
    connection.close()


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_mesh_needs_descriptors(left: int) -> None:
    before = opened()
    with descriptors_left(left), pytest.raises(OSError, match="Too many open files"):
        _core.HostMesh.join(0, 2)
    assert opened() == before


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_group_needs_descriptors(left: int) -> None:
    before = opened()
    mesh = _core.HostMesh.join(0, 1)
    pairs = [socket.socketpair() for _ in range(2)]
    ends = [ours.detach() for ours, _ in pairs]
    with descriptors_left(left), pytest.raises(OSError, match="Too many open files"):
        _core.ScheduleGroup.create(mesh, 1, 0, [0, -1], [[], ends], 5.0)
    for _, theirs in pairs:
        await_end(theirs)
    mesh.close()
    del mesh
    assert opened() == before


def test_a_shared_tensor_needs_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    dist.empty_shared(1)  # this imports the required modules
    before = opened()
    with descriptors_left(0), pytest.raises(dist.OutOfDescriptorsError) as caught:
        dist.empty_shared(1000)
    said = str(caught.value)
    who = rf"rank 3 \(pid {os.getpid()}\)"
    assert re.match(rf"{who}: out of file descriptors \((\d+) of \1\), needed for a shared tensor", said)
    assert "ulimit -n" in said
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.EMFILE
    assert opened() == before
