"""A launcher's stores: an error about torch's store is reported, unless the program serves a store of its own."""

from __future__ import annotations

import errno
import os

import pytest

from paceline.operate.launch.job import Command, Job
from paceline.operate.launch.workers import worker_stores
from paceline.operate.launch.workers.worker_stores import WorkerStores


@pytest.mark.parametrize(("number", "is_said"), [(errno.EMFILE, True), (errno.EADDRINUSE, False)])
def test_a_store_that_cannot_be_opened_is_told(monkeypatch, number, is_said):
    def fail(fd: int) -> None:
        os.close(fd)
        raise OSError(number, os.strerror(number))

    said: list[str] = []
    stores = WorkerStores(Job(Command(("x.py",))), "127.0.0.1", None, said.append)
    stores.reserve()
    monkeypatch.setattr(worker_stores._core, "StoreServer", fail)
    stores.open_torch_store()
    stores.close()
    assert [os.strerror(number) in line for line in said] == [True] * is_said
