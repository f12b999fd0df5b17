"""Samplers and loaders on several ranks."""

from __future__ import annotations

import pytest
import torch

import paceline as dist

LENGTH = 17


def outcomes() -> torch.Tensor:
    """What evaluation gives for each sample."""
    return torch.rand(LENGTH, 2, generator=torch.Generator().manual_seed(0))


def evaluate_in_parts() -> list[float]:
    dist.init_process_group()
    sampler = dist.DistributedEvalSampler(range(LENGTH))
    mine = outcomes()[list(sampler)]
    everyones = sampler.gather(mine)
    assert torch.equal(everyones, outcomes())

    mean = dist.mean_over_samples(mine.sum(0), len(mine))
    torch.testing.assert_close(mean, outcomes().double().mean(0))
    assert dist.mean_over_samples(dist.get_rank() + 1.0, dist.get_rank()).shape == ()
    with pytest.raises(ZeroDivisionError, match="count is 0 on every rank"):
        dist.mean_over_samples(0.0, 0)
    return everyones.mean(0).tolist()


def test_an_evaluation_in_parts_has_the_bits_of_one_in_one_piece(ranks):
    for size in (2, 3, 4):
        assert ranks(size)(evaluate_in_parts) == [outcomes().mean(0).tolist()] * size


def evaluate_less_than_there_are_ranks() -> None:
    dist.init_process_group()
    sampler = dist.DistributedEvalSampler(range(2))
    values = torch.tensor([5, 6])[list(sampler)]
    assert sampler.gather(values).tolist() == [5, 6]
    assert dist.mean_over_samples(values.sum(), len(values)).item() == 5.5


def test_ranks_without_a_sample_take_part_in_an_evaluation(ranks):
    ranks(3)(evaluate_less_than_there_are_ranks)


def refuse_another_group() -> None:
    dist.init_process_group()
    alone = dist.new_group([0])
    with pytest.raises(ValueError, match=r"rank \d: gather got a group .*; it needs one of 2 ranks"):
        dist.DistributedEvalSampler(range(2)).gather(torch.ones(1), group=alone)


def test_a_group_of_another_size_is_refused(ranks):
    ranks(2)(refuse_another_group)


def load_in_part(state: dict[str, int | bool] | None, steps: int) -> tuple[list[int], dict[str, int | bool]]:
    dist.init_process_group()
    loader = dist.StatefulLoader(range(LENGTH), 2)
    if state is not None:
        loader.load_state_dict(state)
    used: list[int] = []
    for _, batch in zip(range(steps), loader, strict=False):
        used += batch.tolist()
    return used, loader.state_dict()


def test_an_epoch_begun_by_three_ranks_is_ended_by_two(ranks):
    begun = ranks(3)(load_in_part, None, 2)
    states = [state for _, state in begun]
    assert states[0] == states[1] == states[2]
    ended = ranks(2)(load_in_part, states[0], LENGTH)
    assert sorted(index for used, _ in begun + ended for index in used) == list(range(LENGTH))
