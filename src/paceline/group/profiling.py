"""Shows calls in a `torch.profiler` profile: `paceline:all_reduce`, its tensors' shapes, and its start and end.

Callers check `torch.autograd.profiler._is_profiler_enabled` before they record anything. The check costs nanoseconds,
and PyTorch's own Python code makes it for the same purpose.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from paceline.group.work import Work

# An event that ends on another thread than the one that began it is missing in the profiles of releases such as 2.6; it
# was found in those of 2.13.
_ENDS_ON_ANY_THREAD = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_autograd: Any = torch.autograd  # its stubs do not list what is used here
_other_thread: ThreadPoolExecutor | None = None
_starting = threading.Lock()


class Recording:
    """One call in the profile, under `name`, from the creation of this object until `end`, which any thread may call.

    Programs select the calls of a backend among a profile's events by `is_async`, which torch sets on every event of
    its own backends. An event that was recorded from Python has it only if another thread than the one that began the
    event ends it. Therefore `end` runs on another thread if the call was synchronous. Releases of PyTorch that show no
    such event get ordinary ones; that of an asynchronous call ends when the call has begun.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._begun_by = threading.get_ident()
        self._record = _autograd._record_function_with_args_enter(name, *tensors)

    def end_with(self, work: Work) -> None:
        """Records the end of an asynchronous call when it is over."""
        if _ENDS_ON_ANY_THREAD:
            work.when_over(self.end)
        else:
            self._exit()

    def end(self) -> None:
        """Records that the call is over; returns when that is in the profile."""
        if not _ENDS_ON_ANY_THREAD or threading.get_ident() != self._begun_by:
            self._exit()
            return
        try:
            ended = _thread().submit(self._exit)
        except RuntimeError:  # the interpreter is exiting, and its threads accept no more work
            self._exit()
        else:
            ended.result()

    def _exit(self) -> None:
        _autograd._record_function_with_args_exit(self._record)


def _thread() -> ThreadPoolExecutor:
    """Returns the thread that ends synchronous calls, which starts with the first of them."""
    global _other_thread
    with _starting:
        if _other_thread is None:
            _other_thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-profiling")
        return _other_thread


def _forget_in_child() -> None:
    global _other_thread, _starting
    _other_thread, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
