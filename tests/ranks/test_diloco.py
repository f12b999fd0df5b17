"""DiLoCo and local SGD on real ranks, compared with references that communicate differently or not at all."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Sequence

import local_reference
import pytest
import torch
from local_reference import RATE, Reference, build, inner_step
from one_world import OneWorld, name_of
from torch import nn

import paceline as dist

SGD = torch.optim.SGD


def nesterov(model: nn.Module, lr: float = 0.7, momentum: float = 0.9) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)


def train(local: dist.DiLoCo, model: nn.Module, inner: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        inner_step(model, inner, dist.get_rank(), step)
        local.step()


def require_equal_bits(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    for each in tensors:
        everyone = [torch.empty_like(each) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, each.detach().contiguous(), group=group)
        assert all(torch.equal(other, everyone[0]) for other in everyone)


def outer_of(local: dist.DiLoCo) -> list[torch.Tensor]:
    return [copy.detach() for _, copy in local.outer_module.pairs()]


def require_close(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close([each.detach() for each in found], list(wanted), rtol=1e-4, atol=1e-5)


def averaging_in_every_step() -> None:
    model, plain = build(), build()
    inner, optimizer = SGD(model.parameters(), lr=RATE), SGD(plain.parameters(), lr=RATE)
    diloco = dist.DiLoCo(model, inner, SGD(model.parameters(), lr=1.0), every=1, fragments=1)
    for step in range(5):
        train(diloco, model, inner, [step])
        inner_step(plain, optimizer, dist.get_rank(), step)
        for param in plain.parameters():
            dist.all_reduce(param.data, dist.ReduceOp.AVG)
        require_close(list(model.parameters()), [param.detach() for param in plain.parameters()])
        require_equal_bits(list(model.parameters()))
    diloco.finish()


def torchs_periodic_averaging() -> None:
    import torch.distributed as torch_dist
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch_dist.init_process_group("gloo", init_method=f"file://{directory[0]}/gloo", rank=rank, world_size=size)
    try:
        for period in (1, 3, 4):
            model, plain = build(period), build(period)
            inner, optimizer = SGD(model.parameters(), lr=RATE), SGD(plain.parameters(), lr=RATE)
            local = dist.LocalSGD(model, inner, every=period)
            averager = PeriodicModelAverager(period, warmup_steps=period - 1)
            for step in range(9):
                train(local, model, inner, [step])
                inner_step(plain, optimizer, rank, step)
                averager.average_parameters(plain.parameters())
                require_close(list(model.parameters()), [param.detach() for param in plain.parameters()])
            local.finish()
    finally:
        torch_dist.destroy_process_group()


def streaming_as_written_down() -> None:
    draw = random.Random(5)
    for _ in range(12):
        every = draw.randint(1, 6)
        fragments, delay = draw.randint(1, min(every, 4)), draw.randrange(every)
        mix, momentum = draw.choice([0.0, 0.25]), draw.choice([0.0, 0.9])
        reference = Reference(dist.get_world_size(), every, fragments, delay, mix, 0.7, momentum)
        model = build()
        inner = SGD(model.parameters(), lr=RATE)
        diloco = dist.DiLoCo(model, inner, nesterov(model, 0.7, momentum), every, fragments, delay=delay, mix=mix)
        for step in range(1, 14):
            train(diloco, model, inner, [step])
            reference.train(step, step)
            require_close(list(model.parameters()), list(reference.models[dist.get_rank()].parameters()))
        require_close(outer_of(diloco), reference.outer)
        require_equal_bits(outer_of(diloco))
        diloco.finish()
        require_equal_bits(list(model.parameters()))


def ranks_may_make_different_numbers_of_steps() -> None:
    for grace_s in (None, 100.0):
        model = build()
        inner = SGD(model.parameters(), lr=RATE)
        diloco = dist.DiLoCo(model, inner, nesterov(model), every=2, fragments=2, delay=1, grace_s=grace_s)
        train(diloco, model, inner, range(3 + 4 * dist.get_rank()))
        diloco.finish()
        require_equal_bits(list(model.parameters()))
        assert diloco.steps == 3 + 4 * (dist.get_world_size() - 1)
        train(diloco, model, inner, range(4))
        diloco.finish()
        require_equal_bits([*model.parameters(), *outer_of(diloco)])


def a_late_rank_within_the_grace_window() -> None:
    model, late = build(), dist.get_rank() == dist.get_world_size() - 1
    inner = SGD(model.parameters(), lr=RATE)
    diloco = dist.DiLoCo(model, inner, SGD(model.parameters(), lr=1.0), every=2, delay=1, grace_s=1000.0)
    reference = Reference(dist.get_world_size(), 2, 1, 1, 0.0, 1.0, 0.0)
    if late:
        dist.barrier()
    train(diloco, model, inner, [1, 2])
    if not late:
        dist.barrier()  # the others have begun the exchange before the late rank makes its first step
    train(diloco, model, inner, [3])
    reference.train(1, 3)
    require_close(outer_of(diloco), reference.outer)
    diloco.finish()


def a_late_rank_beyond_the_grace_window() -> None:
    model, rank, size = build(), dist.get_rank(), dist.get_world_size()
    late = rank == size - 1
    inner = SGD(model.parameters(), lr=RATE)
    diloco = dist.DiLoCo(model, inner, SGD(model.parameters(), lr=1.0), every=3, delay=0, grace_s=0.05)
    before = [param.detach().clone() for param in model.parameters()]
    train(diloco, model, inner, [1])
    if late:
        inner_step(model, inner, rank, 2)
        progress = [param.detach() - each for param, each in zip(model.parameters(), before, strict=True)]
        dist.barrier()
        diloco.step()
        assert diloco.steps == 4, "it goes on with the others' number of steps"
        kept = [param.detach() - outer for param, outer in zip(model.parameters(), outer_of(diloco), strict=True)]
        require_close(kept, progress)
    else:
        train(diloco, model, inner, [2, 3])  # this returns although one rank has not arrived
        require_equal_bits(list(model.parameters()), others_of(size))
        dist.barrier()
    require_equal_bits(outer_of(diloco))
    diloco.finish()
    require_equal_bits(list(model.parameters()))


def others_of(size: int) -> dist.ProcessGroup:
    group = dist.new_group(range(size - 1), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def skipped_steps_accumulation_and_schedules() -> None:
    model = build()
    inner, outer = torch.optim.AdamW(model.parameters(), lr=0.01), nesterov(model)
    diloco = dist.DiLoCo(model, inner, outer, every=2, fragments=2)
    inner_schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
    outer_schedule = torch.optim.lr_scheduler.StepLR(outer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        inner.zero_grad()
        for part in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(local_reference.batch(dist.get_rank(), 2 * step + part)).float().square().sum()
            scaler.scale(loss / 2).backward()
        if step == 2 and dist.get_rank() == 0:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(inner)
        scaler.update()
        diloco.step()
        inner_schedule.step()
        if diloco.steps % 2 == 0:
            outer_schedule.step()
        require_equal_bits(outer_of(diloco))
    assert outer.param_groups[0]["lr"] == pytest.approx(0.7 / 8)
    assert scaler.get_scale() == (4.0 if dist.get_rank() == 0 else 8.0), "one rank has skipped a step"
    diloco.finish()
    require_equal_bits(list(model.parameters()))


def buffers_are_averaged_with_the_last_fragment() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]), persistent=False)
    model.register_buffer("bounds", torch.tensor([-torch.inf, dist.get_rank()]))
    inner = SGD(model.parameters(), lr=RATE)
    diloco = dist.DiLoCo(model, inner, nesterov(model), every=2, fragments=2)
    assert model.bounds.tolist() == [-torch.inf, 0.0], "it begins as on rank 0"
    train(diloco, model, inner, [1])
    means = model[1].running_mean.clone()
    dist.all_reduce(means, dist.ReduceOp.AVG)
    assert not torch.allclose(model[1].running_mean, means), "until then each rank has its own"
    train(diloco, model, inner, [2])
    require_equal_bits([model[1].running_mean, model[1].running_var, model.bounds])
    assert model.bounds.tolist() == [-torch.inf, 0.0]
    train(diloco, model, inner, range(3 + dist.get_rank()))
    diloco.finish()
    require_equal_bits(list(model.state_dict().values()))


def a_state_goes_on_at_any_number_of_ranks() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build()
    inner, outer = torch.optim.AdamW(model.parameters(), lr=0.01), nesterov(model)
    diloco = dist.DiLoCo(model, inner, outer, every=4, fragments=2)
    train(diloco, model, inner, range(5))
    saved = copy.deepcopy([model.state_dict(), diloco.state_dict()])
    train(diloco, model, inner, range(5, 11))
    diloco.finish()

    again = build(1)
    inner_again = torch.optim.AdamW(again.parameters(), lr=0.01)
    resumed = dist.DiLoCo(again, inner_again, nesterov(again), every=4, fragments=2)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.steps == 5
    train(resumed, again, inner_again, range(5, 11))
    resumed.finish()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    from_first = [saved]
    dist.broadcast_object_list(from_first)
    fewer = dist.new_group(range(size - 1))
    if rank < size - 1:
        model = build(2)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        diloco = dist.DiLoCo(model, inner, nesterov(model), every=3, fragments=3, process_group=fewer)
        model.load_state_dict(from_first[0][0])
        diloco.load_state_dict(from_first[0][1])
        require_equal_bits([*outer_of(diloco), *model.parameters()], fewer)
        train(diloco, model, inner, range(5, 11))
        require_equal_bits(outer_of(diloco), fewer)
        diloco.finish()
        with pytest.raises(ValueError, match=r"the state is of another model: '0\.bias' is a trained parameter only"):
            diloco.load_state_dict({**from_first[0][1], "parameters": {}})


def a_state_is_not_loaded_while_exchanges_go_on() -> None:
    model = build()
    inner = SGD(model.parameters(), lr=RATE)
    diloco = dist.DiLoCo(model, inner, nesterov(model), every=1)
    train(diloco, model, inner, [1])
    with pytest.raises(RuntimeError, match="a state was loaded after steps"):
        diloco.load_state_dict(diloco.state_dict())
    diloco.finish()
    diloco.load_state_dict(diloco.state_dict())
    train(diloco, model, inner, [2])
    diloco.finish()


def outer_parameters_are_lent_to_the_model() -> None:
    model = build()
    inner = SGD(model.parameters(), lr=RATE)
    diloco = dist.DiLoCo(model, inner, nesterov(model), every=4)
    train(diloco, model, inner, range(3))
    own = [param.detach().clone() for param in model.parameters()]
    with diloco.outer_parameters() as lent:
        require_equal_bits(list(lent.parameters()))
        require_close(list(lent.parameters()), [param.detach() for param in build().parameters()])
    assert all(torch.equal(param, kept) for param, kept in zip(model.parameters(), own, strict=True))
    diloco.finish()


def half_precision_has_outer_parameters_in_single() -> None:
    model = build().to(torch.bfloat16)
    for each in model[2].parameters():
        each.requires_grad_(False)
    inner = SGD(model.parameters(), lr=RATE)
    diloco = dist.DiLoCo(model, inner, nesterov(model), every=2, fragments=2)
    assert {each.dtype for each in outer_of(diloco)} == {torch.float32}
    for step in range(3):
        inner.zero_grad()
        model(local_reference.batch(dist.get_rank(), step).bfloat16()).float().square().sum().backward()
        inner.step()
        diloco.step()
    diloco.finish()
    require_equal_bits(list(model.parameters()))


def wrong_arguments() -> None:
    model = build()
    inner, other = SGD(model.parameters(), lr=RATE), build()
    cases: list[tuple[dict[str, object], str]] = [
        ({"every": 0}, "every is 0"),
        ({"fragments": 0}, "fragments is 0"),
        ({"fragments": 5}, r"fragments is 5; .* trained parameters \(4\)"),
        ({"every": 2, "fragments": 3}, r"at most the number of inner steps of a round \(2\)"),
        ({"every": 4, "delay": 4}, "delay is 4; it must be a number of inner steps from 0 to 3"),
        ({"delay": -1}, "delay is -1"),
        ({"mix": 1.0}, "mix is 1.0"),
        ({"grace_s": 0.0}, "grace_s is 0.0"),
        ({"wire": "int2"}, "wire is 'int2'; it must be one of bf16, int8, int4"),
        ({"outer": inner}, "the same object"),
        ({"outer": SGD(other.parameters(), lr=1.0)}, "the outer optimizer lacks 4 of the 4 parameters"),
        ({"outer": 0.7}, "the outer optimizer is a float"),
        ({"inner": SGD(other.parameters(), lr=1.0)}, "the inner optimizer has 4 parameters that are not the model's"),
    ]
    for changed, message in cases:
        arguments = {"inner": inner, "outer": nesterov(model), **changed}
        with pytest.raises(ValueError, match=f"rank {dist.get_rank()}: .*{message}"):
            dist.DiLoCo(model, **arguments)
    with pytest.raises(ValueError, match="double precision"):
        dist.LocalSGD(build().double(), wire="int4")
    with pytest.raises(ValueError, match="nothing to exchange"):
        frozen = build().requires_grad_(False)
        dist.LocalSGD(frozen)


def arguments_that_differ_between_ranks() -> None:
    model = build()
    with pytest.raises(dist.CollectiveMismatchError, match=r"rank 0: every=2; ranks? 1.*: every=3"):
        dist.LocalSGD(model, every=2 + min(dist.get_rank(), 1))
    with pytest.raises((ValueError, dist.CollectiveMismatchError), match="every is 0"):
        dist.LocalSGD(model, every=dist.get_rank())


WORLD = OneWorld(
    averaging_in_every_step,
    torchs_periodic_averaging,
    streaming_as_written_down,
    ranks_may_make_different_numbers_of_steps,
    a_late_rank_within_the_grace_window,
    a_late_rank_beyond_the_grace_window,
    skipped_steps_accumulation_and_schedules,
    buffers_are_averaged_with_the_last_fragment,
    a_state_goes_on_at_any_number_of_ranks,
    a_state_is_not_loaded_while_exchanges_go_on,
    outer_parameters_are_lent_to_the_model,
    half_precision_has_outer_parameters_in_single,
    wrong_arguments,
    arguments_that_differ_between_ranks,
)


@pytest.mark.parametrize("name", [name_of(each) for each in WORLD.programs.values()])
def test_local_training_on_three_ranks(name):
    WORLD.require(3, name)


def train_alone() -> None:
    dist.init_process_group()
    reference, model = Reference(1, 3, 2, 1, 0.25, 0.7, 0.9), build()
    inner = SGD(model.parameters(), lr=RATE)
    diloco = dist.DiLoCo(model, inner, nesterov(model), every=3, fragments=2, delay=1, mix=0.25)
    train(diloco, model, inner, range(1, 8))
    reference.train(1, 7)
    require_close(list(model.parameters()), list(reference.models[0].parameters()))
    diloco.finish()


def test_a_single_rank_needs_no_other(ranks):
    ranks(1)(train_alone)
