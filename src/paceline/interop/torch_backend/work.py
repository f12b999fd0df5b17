"""Adapters from Paceline's asynchronous calls to `torch.distributed.Work`."""

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

# Before PyTorch 2.7, the C++ code keeps only the C++ part of a Work alive and hangs if the Python part is freed.
_KEEPS_WORKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 7)
_kept: set[TorchWork] = set()
_WORK = "_paceline_work"

_GIVE = "_set_forward_pass_work_handle"
_given: WeakKeyDictionary[Reducer, TorchWork] = WeakKeyDictionary()


@eager_methods
class RunningWork(TorchWork):
    """An asynchronous call, in progress or complete."""

    def __init__(self, work: Work, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._running = work.with_results(results)
        self._written: list[weakref.ref[torch.Tensor]] = []  # result tensors that keep this object alive

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """Waits for the call, for at most `timeout` if that is positive."""
        self._running.wait(timeout if timeout > _FOR_EVER else None)
        if self in _kept:
            self._hand_over()
        return True

    def _hand_over(self) -> None:
        """Makes several result tensors keep this object alive, because torch may wait for it once per tensor."""
        _kept.discard(self)
        results = self._running.result()
        if len(results) > 1:
            self._running = Work(None, "a completed call")  # avoids a reference cycle with the tensors
            self._written = [weakref.ref(tensor) for tensor in results]
            for tensor in results:
                vars(tensor)[_WORK] = self

    def synchronize(self) -> None:
        """Waits for the call, like `wait`, because there are no streams to synchronize."""
        self._running.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Returns True if the call has succeeded or failed."""
        return self._running.is_completed()

    def is_success(self) -> bool:
        """Returns True if the call has completed successfully."""
        return self._running.is_success()

    def exception(self) -> Exception | None:
        """Returns the error that the call raised, or None."""
        return self._running.exception()

    def result(self) -> list[torch.Tensor]:
        """Waits for the call and returns its output tensors."""
        if self._written:
            return [tensor for reference in self._written if (tensor := reference()) is not None]
        return self._running.result()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future for the output tensors. The future completes even if `wait` is never called."""
        _kept.discard(self)
        return _completed(self.result()) if self._written else self._running.get_future()

    def source_rank(self) -> int:
        """Returns the sender's group rank if the call is a receive."""
        return self._running.source_rank()

    _source_rank = source_rank

    def boxed(self) -> Any:
        """Returns the C++ part of the Work; keeps the Python part alive until `wait` or `get_future` is called."""
        _kept.add(self)
        return super().boxed()


@eager_methods
class FinishedWork(TorchWork):
    """A synchronous call that has already succeeded."""

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
        """Returns None, because the call succeeded."""

    def result(self) -> list[torch.Tensor]:
        """Returns the call's output tensors."""
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a completed future with the output tensors."""
        _kept.discard(self)
        return _completed(self.result())

    def source_rank(self) -> int:
        """Returns -1, because the call is not a receive."""
        return -1

    _source_rank = source_rank

    def boxed(self) -> Any:
        """Returns the C++ part of the Work; keeps the Python part alive until `wait` or `get_future` is called."""
        _kept.add(self)
        return super().boxed()


def _completed(results: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
    devices: list[int | str | torch.device] = [*{tensor.device: None for tensor in results if not tensor.is_cpu}]
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices or None)
    future.set_result(results)
    return future


def keep_alive(work: RunningWork | FinishedWork) -> RunningWork | FinishedWork:
    """Keeps `work` alive until `wait` or `get_future` is called, unless PyTorch does so itself; returns `work`."""
    if not _KEEPS_WORKS:
        _kept.add(work)
    return work


def keep_works_of_reducers() -> None:
    """Patches PyTorch's DDP reducers to keep alive the Work that they receive from a forward pass in `join`.

    In all PyTorch releases, a reducer keeps only the C++ part of that Work alive. If the Python part is freed, the wait
    during backward never completes, and no Paceline call can time out.
    """
    give = getattr(Reducer, _GIVE, None)
    if give is None or getattr(give, "keeps", False):
        return

    def give_and_keep(reducer: Reducer, work: TorchWork, use_static_world_size: bool) -> None:
        _given[reducer] = work
        give(reducer, work, use_static_world_size)

    vars(give_and_keep)["keeps"] = True
    setattr(Reducer, _GIVE, give_and_keep)
