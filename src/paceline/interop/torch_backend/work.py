"""Paceline's works as `torch.distributed.Work`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._C._distributed_c10d import Reducer
from torch.distributed import Work as TorchWork

from paceline.comm.group.eager import eager_methods
from paceline.comm.group.work import Work

_FOR_EVER = timedelta(0)

# Before release 2.7, torch's C++ code keeps only its side of a Work alive, and waits forever if the other is freed.
_KEEPS_WORKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 7)
_kept: set[TorchWork] = set()
_WORK = "_paceline_work"

_GIVE = "_set_forward_pass_work_handle"
_given: WeakKeyDictionary[Reducer, TorchWork] = WeakKeyDictionary()


@eager_methods
class RunningWork(TorchWork):
    """A call that runs or has run asynchronously."""

    def __init__(self, work: Work, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._running = work.with_results(results)
        self._written: list[weakref.ref[torch.Tensor]] = []  # the results that keep this object alive

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """Waits for the call, at most for `timeout` if that is positive."""
        self._running.wait(timeout if timeout > _FOR_EVER else None)
        if self in _kept:
            self._hand_over()
        return True

    def _hand_over(self) -> None:
        """Makes the call's results keep this object alive, since torch may wait for it once per result."""
        _kept.discard(self)
        results = self._running.result()
        if len(results) > 1:
            self._running = Work(None, "a call that is over")  # must not keep the tensors alive in turn
            self._written = [weakref.ref(tensor) for tensor in results]
            for tensor in results:
                vars(tensor)[_WORK] = self

    def synchronize(self) -> None:
        """Waits for the call like `wait`, since there are no streams."""
        self._running.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Returns whether the call has completed, successfully or not."""
        return self._running.is_completed()

    def is_success(self) -> bool:
        """Returns whether the call has completed successfully."""
        return self._running.is_success()

    def exception(self) -> Exception | None:
        """Returns the call's error, or None."""
        return self._running.exception()

    def result(self) -> list[torch.Tensor]:
        """Waits for the call, and returns the tensors that it wrote."""
        if self._written:
            return [tensor for reference in self._written if (tensor := reference()) is not None]
        return self._running.result()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the tensors, which completes without a `wait`."""
        _kept.discard(self)
        return _completed(self.result()) if self._written else self._running.get_future()

    def source_rank(self) -> int:
        """Returns the sender's rank in the group, if the call is a receive."""
        return self._running.source_rank()

    _source_rank = source_rank

    def boxed(self) -> Any:
        """Returns torch's side of the Work, and keeps this side until `wait` or `get_future` is called."""
        _kept.add(self)
        return super().boxed()


@eager_methods
class FinishedWork(TorchWork):
    """A call that had completed successfully when it returned."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """Returns True immediately."""
        _kept.discard(self)
        return True

    is_completed = is_success = wait

    def synchronize(self) -> None:
        """Returns immediately."""

    block_current_stream = synchronize

    def exception(self) -> None:
        """Returns None, since the call was successful."""

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that the call wrote."""
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a completed future of the tensors."""
        _kept.discard(self)
        return _completed(self.result())

    def source_rank(self) -> int:
        """Returns -1, since the call was not a receive."""
        return -1

    _source_rank = source_rank

    def boxed(self) -> Any:
        """Returns torch's side of the Work, and keeps this side until `wait` or `get_future` is called."""
        _kept.add(self)
        return super().boxed()


def _completed(results: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(results)
    return future


def keep_alive(work: RunningWork | FinishedWork) -> RunningWork | FinishedWork:
    """Returns `work`, and keeps it until `wait` or `get_future` is called, in releases where torch does not."""
    if not _KEEPS_WORKS:
        _kept.add(work)
    return work


def keep_works_of_reducers() -> None:
    """Makes the reducers of torch's DistributedDataParallel keep the Work that a forward in `join` passes to them.

    In every release, a reducer keeps only torch's side of that Work. Once the Python side is freed, the wait in the
    backward never completes, and no call of Paceline can time out.
    """
    give = getattr(Reducer, _GIVE, None)
    if give is None or getattr(give, "keeps", False):
        return

    def give_and_keep(reducer: Reducer, work: TorchWork, use_static_world_size: bool) -> None:
        _given[reducer] = work
        give(reducer, work, use_static_world_size)

    vars(give_and_keep)["keeps"] = True
    setattr(Reducer, _GIVE, give_and_keep)
