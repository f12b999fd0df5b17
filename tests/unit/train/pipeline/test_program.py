"""Pipeline schedules as data: their results, termination, and duration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.pipeline.pipeline import into_stages
from paceline.train.pipeline.program import (
    Action,
    PipelineFaultError,
    PipelinePhase,
    PipelineProgram,
    PipelineSchedule,
    StageTransfer,
    Task,
    forwards_only,
    make_pipeline_schedule,
    program_of,
    simulate,
    verify_program,
)


@st.composite
def plans(draw) -> PipelineSchedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    ranks = draw(st.integers(1, 6))
    micro_batches = ranks * draw(st.integers(1, 3)) if name == "interleaved" else draw(st.integers(1, 12))
    return make_pipeline_schedule(name, ranks, micro_batches, draw(st.integers(1, 3)) if name == "interleaved" else 1)


@given(plans(), st.integers(0, 3))
def test_every_schedule_ends_even_where_messages_block(plan, posted_ahead):
    for blocks in (False, True):
        verify_program(program_of(plan, posted_ahead), blocks)


@given(plans())
def test_forwards_alone_pass_in_the_same_order(plan):
    steps = [step for rank in program_of(forwards_only(plan)).steps for step in rank if isinstance(step, Task)]
    assert len(steps) == plan.stages * plan.micro_batches
    assert simulate(forwards_only(plan)).length >= plan.micro_batches


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_bubbles_are_those_of_the_papers(ranks, turns):
    micro_batches, wait = turns * ranks, ranks - 1
    for name in ("gpipe", "1f1b"):
        assert simulate(make_pipeline_schedule(name, ranks, micro_batches, 1)).bubble == pytest.approx(
            wait / (micro_batches + wait)
        )
    for chunks in (2, 3):
        found = simulate(make_pipeline_schedule("interleaved", ranks, micro_batches, chunks)).bubble
        assert found == pytest.approx(wait / (micro_batches * chunks + wait))
    found = simulate(make_pipeline_schedule("zero_bubble", ranks, micro_batches, 1)).bubble
    assert found == pytest.approx(wait / (3 * micro_batches + wait))


def test_what_schedules_keep_in_memory():
    assert verify_program(program_of(make_pipeline_schedule("gpipe", 4, 8, 1))) == (8, 8, 8, 8)
    assert verify_program(program_of(make_pipeline_schedule("1f1b", 4, 8, 1))) == (4, 3, 2, 1)
    assert verify_program(program_of(make_pipeline_schedule("zero_bubble", 4, 8, 1))) == (4, 4, 4, 4)


def test_a_slow_network_makes_a_step_longer():
    plan = make_pipeline_schedule("1f1b", 4, 8, 1)
    assert simulate(plan, message_s=0.5).length > simulate(plan).length


def faulty(plan: PipelineSchedule, rank: int, order: list[Task]) -> PipelineSchedule:
    return replace(plan, orders=(*plan.orders[:rank], tuple(order), *plan.orders[rank + 1 :]))


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_or_double_task_is_found(rank, at):
    plan = make_pipeline_schedule("1f1b", 2, 4, 1)
    order = list(plan.orders[rank])
    for wrong in (order[:at] + order[at + 1 :], [*order, order[at]]):
        with pytest.raises(PipelineFaultError, match="stage|times"):
            verify_program(program_of(faulty(plan, rank, wrong)))


def test_a_backward_before_its_forward_is_found():
    plan = make_pipeline_schedule("1f1b", 2, 2, 1)
    with pytest.raises(PipelineFaultError, match="task 1B0 comes before 1F0 on its own rank"):
        verify_program(program_of(faulty(plan, 1, [plan.orders[1][1], plan.orders[1][0], *plan.orders[1][2:]])))


def test_ranks_that_wait_for_one_another_are_named():
    plan = make_pipeline_schedule("gpipe", 2, 2, 1)
    forwards, backwards = plan.orders[0][:2], plan.orders[0][2:]
    hanging = faulty(plan, 0, [forwards[0], backwards[0], forwards[1], backwards[1]])
    with pytest.raises(PipelineFaultError, match="wait for each other: rank 0 at await the gradient .* rank 1 at"):
        verify_program(program_of(hanging))


def test_an_early_receive_hangs_only_where_messages_block():
    program = program_of(make_pipeline_schedule("1f1b", 2, 4, 1), 0)
    posts = [step for step in program.steps[1] if isinstance(step, StageTransfer) and step.action is Action.POST]
    others = [step for step in program.steps[1] if step not in posts]
    early = PipelineProgram(program.plan, (program.steps[0], (*reversed(posts), *others)))
    verify_program(early)
    with pytest.raises(PipelineFaultError, match="wait for each other"):
        verify_program(early, blocks=True)


@given(plans(), st.data())
def test_a_message_that_is_left_out_is_found(plan, data):
    program = program_of(plan)
    transfers = [
        (rank, each) for rank, steps in enumerate(program.steps) for each in steps if isinstance(each, StageTransfer)
    ]
    if not transfers:
        return
    rank, gone = data.draw(st.sampled_from(transfers))
    steps = tuple(each for each in program.steps[rank] if each != gone)
    with pytest.raises(PipelineFaultError, match=f"rank {rank} has '{gone.action.value}' 0 times"):
        verify_program(replace(program, steps=(*program.steps[:rank], steps, *program.steps[rank + 1 :])))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("2f2b", 2, 4, 1), "unknown schedule '2f2b'; the schedules are gpipe, 1f1b"),
        (("1f1b", 2, 0, 1), "micro_batches is 0; it must be at least 1"),
        (("interleaved", 4, 6, 2), "needs a multiple of 4 micro-batches"),
        (("1f1b", 2, 4, 2), "use 'interleaved'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        make_pipeline_schedule(*arguments)


class Weighted:
    """Represents a layer that has a given number of parameters."""

    def __init__(self, weight: int) -> None:
        self.weight = weight

    def parameters(self) -> list[Weighted]:
        return [self] if self.weight else []

    def numel(self) -> int:
        return self.weight


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 6))
def test_stages_are_balanced(weights, stages):
    layers = [Weighted(weight) for weight in weights]
    if len(layers) < stages:
        with pytest.raises(ValueError, match="each stage needs at least one"):
            into_stages(layers, stages, None)
        return
    divided = into_stages(layers, stages, None)
    assert [each for stage in divided for each in stage] == list(range(len(layers)))
    assert len(divided) == stages and all(divided)
    heaviest = max(sum(1 + weights[each] for each in stage) for stage in divided)
    assert heaviest <= max(sum(1 + w for w in weights) / stages + max(weights) + 1, max(weights) + 1)


def test_phases_are_in_the_order_that_the_proof_unpacks():
    assert [phase.value for phase in PipelinePhase] == ["F", "B", "I", "W"]
