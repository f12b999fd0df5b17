"""The mean of a step in the usual loop, in one process: included samples, unchanged values, and errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import paceline as dist


class Twice(nn.Module):
    """A network with a buffer that counts forward passes, and a parameter that only some forward passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(inputs))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group(elastic=True)
    yield
    dist.destroy_process_group()


def loop(model: nn.Module, **options: object) -> tuple[dist.DistributedDataParallel, dist.ElasticState, object]:
    wrapped = dist.DistributedDataParallel(model, **options)
    loader = dist.StatefulLoader(torch.arange(16.0).reshape(8, 2), 4)
    return wrapped, dist.ElasticState(wrapped, loader=loader), loader


@pytest.mark.usefixtures("group")
def test_alone_a_backward_leaves_its_own_gradients() -> None:
    plain = Twice()
    model, state, loader = loop(Twice())
    model.module.load_state_dict(plain.state_dict())
    for _ in state.epochs(1):
        for inputs in loader:
            model(inputs).square().sum().backward()
            plain(inputs).square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert model.module.norm.num_batches_tracked == 2


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", ["weight", "skip"])
def test_a_step_without_weight_leaves_all_as_it_was(how: str) -> None:
    model, state, loader = loop(Twice())
    for _ in state.epochs(1):
        for step, inputs in enumerate(loader):
            if step == 1:
                before = [param.grad.clone() for param in model.parameters()]
                mean = model.module.norm.running_mean.clone()
            if step == 1 and how == "weight":
                model.weight(0)
            output = model(inputs * float("nan") if step else inputs).sum()
            if step == 1 and how == "skip":
                state.skip_batch()
            else:
                output.backward()
    for param, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad, gradient)
    assert torch.equal(model.module.norm.running_mean, mean)
    assert model.module.norm.num_batches_tracked == 1


@pytest.mark.usefixtures("group")
def test_a_weight_must_be_a_number_that_counts() -> None:
    model, *_ = loop(Twice())
    for weight in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            model.weight(weight)


@pytest.mark.usefixtures("group")
def test_a_weight_needs_an_elastic_state() -> None:
    with pytest.raises(RuntimeError, match="no ElasticState holds"):
        dist.DistributedDataParallel(Twice()).weight(2)


@pytest.mark.usefixtures("group")
def test_options_that_need_ranks_which_stay_are_refused() -> None:
    for options, text in (
        ({"deterministic": True, "logical_shards": 2}, "use LogicalShards"),
        ({"overlap": True}, "overlap=True"),
    ):
        with pytest.raises(ValueError, match=text):
            loop(Twice(), **options)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        loop(dist.convert_sync_batchnorm(Twice()))
    with pytest.raises(ValueError, match="0 StatefulLoaders"):
        dist.ElasticState(dist.DistributedDataParallel(Twice()))


@pytest.mark.usefixtures("group")
def test_calls_that_need_ranks_which_stay_are_refused() -> None:
    model, *_ = loop(Twice())
    with pytest.raises(RuntimeError, match="no_sync was called.*accumulate too"), model.no_sync():
        pass
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        model.register_comm_hook(None, dist.parallel.hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="Join"), model.join():
        pass


@pytest.mark.usefixtures("group")
def test_a_backward_outside_the_loop_is_refused() -> None:
    model, *_ = loop(Twice())
    with pytest.raises(RuntimeError, match="before the loop over the StatefulLoader"):
        model(torch.ones(4, 2)).sum().backward()


@pytest.mark.usefixtures("group")
def test_a_batch_without_all_gradients_is_told_so() -> None:
    model, state, loader = loop(Twice())
    with pytest.raises(RuntimeError, match="the last backward.*norm"):
        for _ in state.epochs(1):
            for inputs in loader:
                model(inputs)
                (model.module.layer(inputs).sum()).backward()


@pytest.mark.usefixtures("group")
def test_shards_cannot_skip() -> None:
    state = dist.ElasticState(dist.LogicalShards(Twice(), 2))
    with pytest.raises(TypeError, match="every shard"):
        state.skip_batch()


@pytest.mark.usefixtures("group")
def test_a_worker_alone_is_told_of_itself() -> None:
    told = []
    model = dist.DistributedDataParallel(Twice())
    loader = dist.StatefulLoader(torch.ones(4, 2), 4)
    state = dist.ElasticState(model, loader=loader, on_view=told.append)
    for _ in state.epochs(1):
        break
    assert told == [dist.ViewChange(1, ("0",), ())]
