"""Paceline's works as those of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import Work as TorchWork

from paceline.group.work import Work

_FOR_EVER = timedelta(0)

# Before release 2.7 torch's C++ keeps its side of a Work only, and waits for ever for one whose Python side has gone.
_KEEPS_WORKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 7)
_kept: set[TorchWork] = set()


class RunningWork(TorchWork):
    """A call that runs, or ran, asynchronously."""

    def __init__(self, work: Work, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._running = work.with_results(results)

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """Waits for it, at most as long as `timeout` if that is positive."""
        _kept.discard(self)
        return self._running.wait(timeout if timeout > _FOR_EVER else None)

    def synchronize(self) -> None:
        """Like `wait`: there are no streams."""
        self._running.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._running.is_completed()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._running.is_success()

    def exception(self) -> Exception | None:
        """Why it failed."""
        return self._running.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors it wrote; waits for them."""
        return self._running.result()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors, completed by itself."""
        _kept.discard(self)
        return self._running.get_future()

    def source_rank(self) -> int:
        """Of a receive: the sender's rank in the group."""
        return self._running.source_rank()

    _source_rank = source_rank


class FinishedWork(TorchWork):
    """A call that was over, and went well, when it returned."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """At once."""
        _kept.discard(self)
        return True

    is_completed = is_success = wait

    def synchronize(self) -> None:
        """At once."""

    block_current_stream = synchronize

    def exception(self) -> None:
        """None."""

    def result(self) -> list[torch.Tensor]:
        """The tensors it wrote."""
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors that has them."""
        _kept.discard(self)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def source_rank(self) -> int:
        """Nobody: it was no message."""
        return -1

    _source_rank = source_rank


def kept(work: RunningWork | FinishedWork) -> RunningWork | FinishedWork:
    """`work`, which lives until somebody has waited for it or has its future, where torch does not see to that."""
    if not _KEEPS_WORKS:
        _kept.add(work)
    return work
