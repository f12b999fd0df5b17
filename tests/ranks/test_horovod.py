"""`paceline.horovod` does what Horovod's documentation says; results are compared with what is computed here."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from launching import run
from one_world import OneWorld
from torch import nn
from torch.nn.functional import mse_loss

import paceline
import paceline.horovod as hvd
from paceline.horovod import running

RANKS = 3


def of_rank(rank: int, rows: int = 2) -> torch.Tensor:
    return torch.arange(rows * 3.0).view(rows, 3) + 10 * rank


def everybodys() -> list[torch.Tensor]:
    return [of_rank(rank) for rank in range(hvd.size())]


def ranks_are_numbered() -> None:
    hvd.init()  # the group is there, so it is used
    assert (hvd.rank(), hvd.size()) == (paceline.get_rank(), RANKS)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (hvd.rank(), RANKS, 0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()


def all_reduces_return_new_tensors() -> None:
    mine = of_rank(hvd.rank())
    total = sum(everybodys())
    assert torch.equal(hvd.allreduce(mine), total / RANKS)
    assert torch.equal(hvd.allreduce(mine, name="x", op=hvd.Sum), total)
    assert torch.equal(hvd.allreduce(mine, average=False), total)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max), everybodys()[-1])
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4), total * 2)
    assert torch.equal(hvd.allreduce(mine, compression=hvd.Compression.fp16, op=hvd.Sum), total)
    assert torch.equal(mine, of_rank(hvd.rank()))
    handle = hvd.allreduce_async(mine, op=hvd.Sum)
    assert torch.equal(hvd.synchronize(handle), total)
    assert hvd.poll(handle)
    first, second = hvd.grouped_allreduce([mine, mine.long()], op=hvd.Sum)
    assert torch.equal(first, total)
    assert torch.equal(second, total.long())


def all_reduces_write_in_place() -> None:
    mine = of_rank(hvd.rank())
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert torch.equal(mine, sum(everybodys()))
    pair = [of_rank(hvd.rank()), of_rank(hvd.rank())]
    hvd.synchronize(hvd.grouped_allreduce_async_(pair, op=hvd.Average))
    assert all(torch.equal(each, sum(everybodys()) / RANKS) for each in pair)


def gradients_flow_through_an_all_reduce() -> None:
    mine = of_rank(hvd.rank()).requires_grad_()
    hvd.allreduce(mine, op=hvd.Sum).sum().backward()
    assert torch.equal(mine.grad, torch.full((2, 3), float(RANKS)))


def rows_of_different_numbers_are_gathered() -> None:
    mine = of_rank(hvd.rank(), rows=hvd.rank() + 1)
    expected = torch.cat([of_rank(rank, rows=rank + 1) for rank in range(RANKS)])
    assert torch.equal(hvd.allgather(mine), expected)
    assert torch.equal(hvd.synchronize(hvd.allgather_async(mine)), expected)
    mine.requires_grad_()
    hvd.allgather(mine).sum().backward()
    assert torch.equal(mine.grad, torch.full_like(mine, RANKS))
    with pytest.raises(ValueError, match="without dimensions"):
        hvd.allgather(torch.tensor(1.0))


def rows_go_to_each_rank() -> None:
    mine = torch.arange(RANKS) + 10 * hvd.rank()
    assert hvd.alltoall(mine).tolist() == [10 * rank + hvd.rank() for rank in range(RANKS)]
    rows, counts = hvd.alltoall(torch.full((RANKS + 1,), hvd.rank()), splits=[2, *[1] * (RANKS - 1)])
    share = 2 if hvd.rank() == 0 else 1
    assert counts.tolist() == [share] * RANKS
    assert rows.tolist() == [rank for rank in range(RANKS) for _ in range(share)]
    with pytest.raises(ValueError, match="give it splits"):
        hvd.alltoall(torch.ones(RANKS + 1))


def rows_are_reduced_and_shared() -> None:
    mine = torch.arange(4.0) + hvd.rank()
    shares = [[0, 1], [2], [3]]
    expected = torch.tensor([float(i) for i in shares[hvd.rank()]]) * RANKS + 3
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), expected)


def roots_state_is_everybodys() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    states = hvd.allgather_object([optimizer.state_dict(), model.state_dict()])
    assert optimizer.param_groups[0]["lr"] == 0.2
    for state, parameters in states:
        assert all(torch.equal(parameters[name], value) for name, value in model.state_dict().items())
        moments = zip(state["state"].values(), optimizer.state_dict()["state"].values(), strict=True)
        assert all(torch.equal(theirs["exp_avg"], mine["exp_avg"]) for theirs, mine in moments)
    assert hvd.broadcast_object({"epoch": hvd.rank(), 3: None}, root_rank=2) == {"epoch": 2, 3: None}
    assert torch.equal(hvd.broadcast(of_rank(hvd.rank()), root_rank=2), of_rank(2))


def process_sets_are_groups() -> None:
    pair = hvd.add_process_set([2, 0])
    assert pair.ranks == [0, 2]
    if pair.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
        assert pair.rank() == (0, None, 1)[hvd.rank()]
    else:
        with pytest.raises(ValueError, match="is not in it"):
            hvd.allreduce(torch.ones(1), process_set=pair)
    hvd.barrier()
    assert hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert 0 <= hvd.join() < RANKS


def refusals_give_their_reasons() -> None:
    with pytest.raises(ValueError, match="Adasum adds gradients pairwise"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)
    with pytest.raises(ValueError, match="both op and average"):
        hvd.allreduce(torch.ones(1), op=hvd.Sum, average=True)
    with pytest.raises(AttributeError, match="paceline.ElasticState"):
        hvd.elastic  # noqa: B018
    with pytest.raises(ValueError, match="no comm"):
        hvd.init(comm=[0])


def batches(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def trained(passes: int, options: dict[str, object], tolerance: float) -> None:
    """Compares `DistributedOptimizer` with one process that averages over all ranks' batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    other_scheduler = torch.optim.lr_scheduler.StepLR(alone, 2, 0.5)
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(4):
        optimizer.zero_grad()
        alone.zero_grad()
        for number in range(passes):
            inputs, targets = batches(passes * step + number, hvd.rank())
            mse_loss(model(inputs), targets).backward()
            for rank in range(RANKS):
                inputs, targets = batches(passes * step + number, rank)
                (mse_loss(reference(inputs), targets) / RANKS).backward()
        reference.unused.grad = torch.zeros(2)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.step()
        scheduler.step()
        other_scheduler.step()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def mistakes_around_a_step_are_said() -> None:
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step = 1"):
        model(torch.ones(1, 3)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    with pytest.raises(ValueError, match="no name for 1 of the 2"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), [("weight", model.weight)])
    with pytest.raises(ValueError, match="occur twice: a"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), [("a", p) for p in model.parameters()])


_FP16 = {"compression": hvd.Compression.fp16}
_WORLD = OneWorld(
    ranks_are_numbered,
    all_reduces_return_new_tensors,
    all_reduces_write_in_place,
    gradients_flow_through_an_all_reduce,
    rows_of_different_numbers_are_gathered,
    rows_go_to_each_rank,
    rows_are_reduced_and_shared,
    roots_state_is_everybodys,
    process_sets_are_groups,
    refusals_give_their_reasons,
    partial(trained, 1, {}, 1e-6),
    partial(trained, 3, {}, 1e-6),
    partial(trained, 1, {"gradient_predivide_factor": 2.0}, 1e-6),
    partial(trained, 2, _FP16, 1e-3),
    mistakes_around_a_step_are_said,
)


@pytest.mark.parametrize("name", _WORLD.programs)
def test_horovods_calls(name):
    _WORLD.require(RANKS, name)


def squared(number: int) -> tuple[int, int]:
    hvd.init()
    return hvd.rank(), number**2


def test_run_returns_what_the_ranks_return(monkeypatch):
    # Forks of a process that has torch; with the usual method each imports it.
    monkeypatch.setattr(running, "spawn", partial(paceline.spawn, start_method="forkserver"))
    assert hvd.run(squared, args=(3,), np=2, hosts="localhost:2", verbose=True) == [(0, 9), (1, 9)]
    with pytest.raises(ValueError, match="paceline run"):
        hvd.run(squared, np=2, hosts="a:1,b:1")


ALONE = """
import horovod.torch as hvd
import torch
hvd.init()
print(hvd.allreduce(torch.ones(2)).tolist(), hvd.size(), hvd.__name__)
"""


def test_a_script_of_horovod_runs_as_it_is(script):
    done = run("--compat", "horovod", "--nproc-per-node", "2", script(ALONE))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] [1.0, 1.0] 2 paceline.horovod" for rank in range(2)]
    assert (done.stdout + done.stderr).count("--compat horovod") == 1


def test_another_launcher_is_not_taken_for_a_job_of_one(monkeypatch, no_secret):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="paceline run --nproc-per-node"):
        hvd.init()
