"""Futures of calls on a device that fails, with a stand-in for the call."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.group.work import Work


class FailingCall:
    """A call whose device reports an error after some queries, as each CUDA function does after an illegal access."""

    def __init__(self, queries: int = 1) -> None:
        self._queries = queries

    def done(self) -> bool:
        self._queries -= 1
        if self._queries < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return False

    def wait(self, timeout_ns: int) -> bool:
        return self.done()

    def outcome(self) -> None:
        return None


class FinishedLater:
    """A call that completes after some queries."""

    def __init__(self, queries: int = 5) -> None:
        self._queries = queries

    def done(self) -> bool:
        self._queries -= 1
        return self._queries < 0

    def wait(self, timeout_ns: int) -> bool:
        return True

    def outcome(self) -> None:
        return None


@pytest.mark.timeout(60)
def test_an_error_of_the_device_fails_its_futures_and_no_others():
    failing = Work(FailingCall(), "all_reduce", [torch.ones(1)]).get_future()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        failing.wait()
    value = torch.ones(1)
    assert Work(FinishedLater(), "all_reduce", [value]).get_future().wait() == [value]
