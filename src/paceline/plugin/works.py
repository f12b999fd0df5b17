"""Paceline's works as those of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import Work as TorchWork

from paceline.group.work import Work


class RunningWork(TorchWork):
    """A call that runs, or ran, asynchronously; `finish` is called once when it is over, before anybody hears of it."""

    def __init__(self, work: Work, results: Sequence[torch.Tensor], finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._running = work.yielding(results, finish)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for it, at most as long as `timeout` if that is positive."""
        return self._running.wait(timeout if timeout > timedelta(0) else None)

    def synchronize(self) -> None:
        """Like `wait`: there are no streams."""
        self._running.wait()

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
        return self._running.get_future()

    def source_rank(self) -> int:
        """Of a receive: the sender's rank in the group."""
        return self._running.source_rank()

    _source_rank = source_rank


def finished(results: Sequence[torch.Tensor]) -> TorchWork:
    """The work of a call that was over when it returned."""
    return RunningWork(Work(None, "a call that is over", results), results)
