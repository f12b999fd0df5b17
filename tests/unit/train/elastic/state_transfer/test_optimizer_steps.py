"""A receiver in the usual loop repeats the members' steps, and detects that it is not a member."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.train.elastic.agreement import FRESH, WINDOWS, BatchAssignment, MemberStatus, agree
from paceline.train.elastic.process_priority import THREAD_NICENESS, run_at_low_priority
from paceline.train.elastic.state_transfer.optimizer_steps import (
    OptimizerStepHooks,
    StateDivergedError,
    StateDivergence,
)
from paceline.train.elastic.state_transfer.snapshot_server import LogReader, append, new_log
from paceline.train.elastic.state_transfer.transfer_protocol import (
    LogItem,
    OptimizerStep,
    RoundResult,
    ViewEntered,
    digest_of_chunk,
)
from paceline.train.elastic.training_state import TrainingState
from paceline.train.module_tensors import memory_of

DEALT = BatchAssignment(5, ("a", "b"))
SNAPSHOT = 5  # the round that follows it
WINDOWS_HERE = 4


def made(round_: int, after: int, number: int = 0) -> OptimizerStep:
    return OptimizerStep(round_, after, f"optimizer {number}")


def passed(round_: int, before: int, digest: int, state: int = 0) -> RoundResult:
    return RoundResult(round_, 0, (), digest, state, DEALT, before)


def digest_of_round(round_: int, is_lost: bool = False) -> int:
    """Returns the digest of a round's result; the lost sender has a different digest before the lost round."""
    return 1000 * is_lost + round_


def history(steps: list[int], lost: int | None) -> list[list[LogItem]]:
    """Returns a sender's log by round, with the given number of steps in each round and an item for its end.

    The lost sender and the other senders have committed different results for the round before `lost`.
    """
    rounds: list[list[LogItem]] = []
    for at, count in enumerate(steps):
        number = SNAPSHOT + at
        before = digest_of_round(number - 1, number == lost)
        items: list[LogItem] = [made(number, before, step) for step in range(count)]
        if number == lost:
            rounds.append(items)
            break
        digest = digest_of_round(number, number + 1 == lost)
        rounds.append([*items, passed(number, before, digest)])
    return rounds


@given(st.lists(st.integers(0, 2), min_size=2, max_size=8), st.data())
def test_a_step_that_was_rolled_back_is_noticed(steps, data):
    lost = data.draw(st.none() | st.integers(SNAPSHOT + 1, SNAPSHOT + len(steps) - 1))
    dying, living = history(steps, lost), history(steps, None)
    taken = data.draw(st.integers(0, sum(map(len, dying))))  # items received before the first sender exits
    course = StateDivergence(SNAPSHOT, digest_of_round(SNAPSHOT - 1), WINDOWS_HERE)
    steps_made: list[OptimizerStep] = []

    def take(item: LogItem) -> None:
        if isinstance(item, OptimizerStep):
            course.steps(item)
            steps_made.append(item)
        else:
            course.passes(item, 0)

    wrong = {item for each in dying for item in each if isinstance(item, OptimizerStep)} - {
        item for each in living for item in each if isinstance(item, OptimizerStep)
    }
    try:
        for item in [item for each in dying for item in each][:taken]:
            take(item)
        while course.round < SNAPSHOT + len(steps):
            here = living[course.round - SNAPSHOT]
            for item in here[sum(each.round == course.round for each in steps_made) :]:
                take(item)
    except StateDivergedError:
        assert wrong & {*steps_made}, "it has gone astray without a wrong step"
    else:
        assert steps_made == [item for each in living for item in each if isinstance(item, OptimizerStep)]


def test_all_parts_are_compared_after_the_first_step():
    course = StateDivergence(SNAPSHOT, 4, WINDOWS_HERE)
    course.passes(passed(5, 4, 5), 0)
    assert course.unchecked == {0, 1, 2, 3}, "nothing was made yet"
    for round_ in range(6, 9):
        course.steps(made(round_, round_ - 1))
        course.passes(passed(round_, round_ - 1, round_), 0)
    assert course.unchecked == {9 % WINDOWS_HERE}
    assert (course.round, course.committed) == (9, 8)


def test_a_large_state_is_compared_once_after_a_step():
    course = StateDivergence(SNAPSHOT, 4, WINDOWS_HERE, is_large=True)
    assert not course.compares(5), "nothing was made yet"
    compared = []
    for round_ in range(5, 15):
        compared.append(course.compares(round_))
        course.passes(passed(round_, round_ - 1, round_), 0 if compared[-1] else None)
        course.steps(made(round_ + 1, round_))
    assert compared == [False, True, True, True, True, *[False] * 5]
    assert not course.unchecked


def test_what_was_not_compared_stays_unchecked():
    course = StateDivergence(SNAPSHOT, 4, WINDOWS_HERE, is_large=True)
    course.steps(made(5, 4))
    course.passes(passed(5, 4, 5, state=7), None)
    assert course.unchecked == {0, 1, 2, 3}


def test_another_state_and_an_obstacle_are_reported():
    course = StateDivergence(SNAPSHOT, 4, WINDOWS_HERE)
    with pytest.raises(StateDivergedError, match="before round 5 its state differed"):
        course.passes(passed(5, 4, 5, state=7), 8)
    with pytest.raises(StateDivergedError, match="with a closure"):
        course.steps(OptimizerStep(5, 4, "optimizer", obstacle="called with a closure"))


def test_a_follower_gets_the_rest_from_one_who_teaches():
    members = [MemberStatus(7, committed=3), MemberStatus(7, committed=3, is_sender=True)]
    agreed = agree([*members, MemberStatus(7, committed=3, has_followed=True)], 1)
    assert (agreed.round, agreed.source, agreed.followers) == (7, (None, None, 1), {2})


@pytest.mark.parametrize(
    "status", [MemberStatus(8, committed=3), MemberStatus(6, committed=3), MemberStatus(7, committed=4)]
)
def test_a_follower_of_another_course_gets_the_whole_state(status):
    followed = MemberStatus(status.round, committed=status.committed, has_followed=True)
    agreed = agree([MemberStatus(7, committed=3), followed, MemberStatus(FRESH)], 1)
    assert (agreed.round, agreed.source, agreed.followers) == (7, (None, 0, 0), frozenset())
    assert not agreed.late


@pytest.fixture
def log() -> Iterator[int]:
    descriptor = new_log()
    yield descriptor
    os.close(descriptor)


def test_the_log_gives_the_steps_of_a_round_in_order(log):
    gradient = torch.arange(3.0)
    for number in range(2):
        append(log, OptimizerStep(6, 5, str(number), gradient.nbytes), [memory_of(gradient)])
    append(log, ViewEntered(6, 20, ("a",)))
    append(log, passed(6, 5, 6))
    reader = LogReader(log)
    found = [reader.next(6, generation, steps) for generation, steps in ((0, 0), (0, 1), (0, 2), (20, 2))]
    names = [each.item.optimizer if isinstance(each.item, OptimizerStep) else type(each.item) for each in found if each]
    assert names == ["0", "1", ViewEntered, RoundResult]
    assert found[0] is not None
    assert found[1] is not None
    assert reader.digest_of(found[1]) == digest_of_chunk([memory_of(gradient)])
    assert reader.ahead == 1
    taken = [reader.forget(*passed) for passed in ((6, 0), (6, 1), (6, 2), (7, 0))]
    assert taken == [0, found[0].stop, found[1].stop, os.fstat(log).st_size]


class Worker:
    """A model whose steps are recorded, and replayed."""

    def __init__(self, seed: int, make: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.optimizer = make(self.module.parameters(), lr=0.1)
        self.registry = TrainingState(self.module, {"optimizer": self.optimizer}, is_replicated=False)
        self.steps = OptimizerStepHooks(self.registry.optimizers)

    def train(self, seed: int) -> None:
        self.optimizer.zero_grad()
        self.module(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 0.01)
        self.optimizer.param_groups[0]["lr"] *= 0.9
        self.optimizer.step()


def tensors_of(item: OptimizerStep, memories: list[memoryview]) -> list[torch.Tensor]:
    """Returns the tensors that a receiver receives for a step."""
    kinds = [(getattr(torch, name.removeprefix("torch.")), shape) for name, shape in item.tensors]
    return [
        torch.frombuffer(bytearray(memory), dtype=dtype).view(shape).clone()
        for (dtype, shape), memory in zip(kinds, memories, strict=True)
    ]


def adam_with_a_tensor(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=torch.tensor(lr), foreach=False)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, adam_with_a_tensor])
def test_steps_made_again_have_the_same_bits(make):
    member, receiver = Worker(1, make), Worker(2, make)
    member.train(0)
    receiver.registry.restore(copy.deepcopy(member.registry.capture()))
    logged: list[tuple[OptimizerStep, list[torch.Tensor]]] = []
    member.steps.at = 6, 5
    member.steps.on_step = lambda item, memories: logged.append((item, tensors_of(item, memories)))
    for seed in range(1, 4):
        member.train(seed)
    for item, tensors in logged:
        receiver.steps.again(item, tensors)
    windows = range(WINDOWS)
    assert [receiver.registry.rolling_digest(each) for each in windows] == [
        member.registry.rolling_digest(each) for each in windows
    ]
    assert receiver.registry.digest() != member.registry.digest(), "buffers are not followed"
    receiver.registry.restore_rest(member.registry.capture_rest(member.steps.are_noted))
    assert receiver.registry.digest() == member.registry.digest()
    for mine, theirs in zip(receiver.module.parameters(), member.module.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_gradients_that_a_learner_has_are_not_sent_again():
    member = Worker(1)
    member.steps.at = 6, 5
    member.steps.on_step = lambda *_: None
    member.train(0)
    assert all(member.steps.are_noted(param) for param in member.module.parameters())
    first, *others = member.module.parameters()
    first.grad.mul_(2)
    others[0].grad = None
    assert [member.steps.are_noted(param) for param in (first, *others)] == [False, False, *[True] * (len(others) - 1)]
    other, memory = others[1], bytearray(others[1].grad.nbytes)
    other.grad = torch.frombuffer(memory, dtype=torch.float32).view_as(other)
    member.steps.note([other])
    assert member.steps.are_noted(other)
    other.grad = torch.frombuffer(memory, dtype=torch.float32).view_as(other)  # a new gradient at the same address
    assert not member.steps.are_noted(other)
    member.steps.at = 7, 6
    assert not any(member.steps.are_noted(param) for param in member.module.parameters())


def test_a_step_with_a_closure_is_an_obstacle():
    worker = Worker(1)
    logged: list[OptimizerStep] = []
    worker.steps.on_step = lambda item, memories: logged.append(item)
    worker.optimizer.step(lambda: 0.0)
    worker.optimizer.step(closure=lambda: 0.0)
    worker.optimizer.grad_scale = torch.ones(1)
    worker.optimizer.step()
    assert ["closure" in logged[0].obstacle, "closure" in logged[1].obstacle] == [True, True]
    assert "GradScaler" in logged[2].obstacle


def test_an_optimizer_that_fails_in_a_learner_is_reported():
    member, receiver = Worker(1), Worker(2)
    logged: list[tuple[OptimizerStep, list[torch.Tensor]]] = []
    member.steps.on_step = lambda item, memories: logged.append((item, tensors_of(item, memories)))
    member.train(0)
    receiver.optimizer.register_step_pre_hook(lambda *_: {}[0])
    with pytest.raises(StateDivergedError, match=r"'optimizer' failed: KeyError\(0\)"):
        receiver.steps.again(*logged[0])


def test_modest_work_returns_and_raises_as_other_work_does():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert run_at_low_priority(lambda: os.getpriority(os.PRIO_PROCESS, 0)) == min(before + THREAD_NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    with pytest.raises(SystemExit):
        run_at_low_priority(lambda: (_ for _ in ()).throw(SystemExit(3)))
