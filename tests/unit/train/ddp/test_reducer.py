"""The reducer in autograd's threads, of which there is one per device."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.train.checks.check_settings import Checks
from paceline.train.checks.module_checks import ModuleChecks
from paceline.train.ddp import reducer as reducers
from paceline.train.ddp.gradient_averager import GradientAverager
from paceline.train.ddp.reducer import BackwardState, OutputHooks, Reducer
from paceline.train.module_tensors import collect_tracked


class SlowGroup:
    """A group of one rank that accepts calls slowly, while other threads run."""

    me = SimpleNamespace(rank=0)
    ranks = (0,)

    def __init__(self) -> None:
        self.called: list[int] = []
        self.is_calling = threading.Event()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def all_reduce_memory(self, pieces: list[int], *_: object) -> SimpleNamespace:
        self.called.append(pieces[0])
        self.is_calling.set()
        time.sleep(0.2)
        return SimpleNamespace(wait=lambda: None)


def test_buckets_that_threads_finish_at_once_start_once():
    module = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(4))
    tracked, group = collect_tracked(module), SlowGroup()
    checks = ModuleChecks(module, tracked, group, Checks(are_on=False), with_buffers=False)  # type: ignore[arg-type]
    averager = GradientAverager(tracked, [1], group, checks=checks, overlap=True)  # type: ignore[arg-type]
    reducer = Reducer(averager, "ParameterList")
    for param in module:
        param.grad = torch.ones(2)
    reducer._state = BackwardState.BACKWARD

    def finish(param: nn.Parameter) -> None:
        for hook in list(param._post_accumulate_grad_hooks.values()):
            hook(param)

    first = threading.Thread(target=finish, args=(module[3],))
    first.start()
    assert group.is_calling.wait(30)
    finish(module[2])
    first.join()
    assert group.called == [module[3].grad.data_ptr(), module[2].grad.data_ptr()]


def test_a_backward_begins_once_for_outputs_on_two_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reducers, "running_backward", lambda: 7)
    hooks, begun, is_beginning = OutputHooks(threading.RLock()), [], threading.Event()

    def begin(task: int) -> None:
        begun.append(task)
        is_beginning.set()
        time.sleep(0.2)
        hooks.task = task

    outputs = [torch.ones(1, requires_grad=True) * 2 for _ in range(2)]
    hooks.watch(outputs, begin)
    reach, reach_other = (next(iter(output._backward_hooks.values())) for output in outputs)
    thread = threading.Thread(target=reach, args=(torch.ones(1),))
    thread.start()
    assert is_beginning.wait(30)
    reach_other(torch.ones(1))
    thread.join()
    assert begun == [7]
    assert hooks.unreached == 0
