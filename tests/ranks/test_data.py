"""Samplers and loaders on several ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from streams import Plain

import paceline as dist

LENGTH = 17


def outcomes() -> torch.Tensor:
    """Returns an evaluation result for each sample."""
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


def stream_in_part(state: dict[str, object] | None, steps: int) -> tuple[list[int], dict[str, object]]:
    dist.init_process_group()
    loader = dist.StatefulLoader(Plain(LENGTH), 2, num_workers=1)
    if state is not None:
        loader.load_state_dict(state)
    used: list[int] = []
    for batch in itertools.islice(loader, steps):
        used += batch.tolist()
    return used, loader.state_dict()


def test_a_stream_begun_by_three_ranks_is_ended_by_two(ranks):
    begun = ranks(3)(stream_in_part, None, 2)
    assert [used for used, _ in begun] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    states = [state for _, state in begun]
    assert states[0] == states[1] == states[2]
    ended = ranks(2)(stream_in_part, states[0], LENGTH)
    assert [used for used, _ in ended] == [[12, 13, 16], [14, 15]]


def train_on_a_stream(remainder: str) -> tuple[list[int], list[float]]:
    dist.init_process_group()
    torch.manual_seed(0)
    model = dist.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    sizes = []
    for batch in dist.StatefulLoader(Plain(LENGTH), 2, remainder=remainder):
        optimizer.zero_grad()
        model(batch[:, None].float()).mean().backward()
        optimizer.step()
        sizes.append(len(batch))
    return sizes, [parameter.item() for parameter in model.parameters()]


@pytest.mark.parametrize(("remainder", "sizes"), [("repeat", [2, 2, 2, 2, 1]), ("drop", [2, 2, 2, 2])])
def test_ranks_end_a_stream_of_unknown_length_together(ranks, remainder, sizes):
    results = ranks(2)(train_on_a_stream, remainder)
    assert [seen for seen, _ in results] == [sizes, sizes]
    assert results[0][1] == results[1][1]


def train_on_an_own_stream(length: int) -> list[int]:
    dist.init_process_group()
    torch.manual_seed(0)
    model = dist.DistributedDataParallel(torch.nn.Linear(1, 1))
    loader = dist.StatefulLoader(Plain(length * (dist.get_rank() + 1)), 2, num_replicas=1, rank=0)
    used: list[int] = []
    with model.join():
        for batch in loader:
            model(batch[:, None].float()).mean().backward()
            used += batch.tolist()
    assert loader.epoch == 1
    return used


def test_ranks_with_streams_of_their_own_end_within_join(ranks):
    assert ranks(3)(train_on_an_own_stream, 3) == [list(range(3)), list(range(6)), list(range(9))]
