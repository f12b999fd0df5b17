"""`paceline.horovod` behaves as Horovod's documentation describes; results equal computed values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from one_world import OneWorld
from torch import nn
from torch.nn.functional import mse_loss

import paceline
import paceline.horovod as hvd
from paceline.interop.horovod.call_queue import CallQueue

RANKS = 3


def of_rank(rank: int, rows: int = 2) -> torch.Tensor:
    return torch.arange(rows * 3.0).view(rows, 3) + 10 * rank


def everybodys() -> list[torch.Tensor]:
    return [of_rank(rank) for rank in range(hvd.size())]


def ranks_are_numbered() -> None:
    hvd.init()  # this uses the existing group
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


def weight(rank: int) -> float:
    """Returns the gradient of rank `rank`'s loss, which differs between the ranks."""
    return 2.0 * rank + 1


SUM = sum(weight(rank) for rank in range(RANKS))

MEAN = SUM / RANKS


def gradient(call: Callable[[torch.Tensor], torch.Tensor], mine: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a call's argument if every element of the result has the gradient `weight(rank)`."""
    leaf = mine.clone().requires_grad_()
    (call(leaf) * weight(hvd.rank())).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def gradients_of_all_reduces_are_reduced() -> None:
    mine = of_rank(hvd.rank())
    assert torch.equal(gradient(partial(hvd.allreduce, op=hvd.Sum), mine), torch.full((2, 3), SUM))
    assert torch.equal(gradient(hvd.allreduce, mine), torch.full((2, 3), MEAN))
    scaled = partial(hvd.allreduce, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4)
    assert torch.equal(gradient(scaled, mine), torch.full((2, 3), 2 * SUM))
    assert torch.equal(gradient(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], mine), torch.full((2, 3), SUM))
    both = gradient(lambda x: sum(hvd.grouped_allreduce([x, 2 * x])), mine)
    assert torch.equal(both, torch.full((2, 3), 3 * MEAN))


def gradients_of_products_and_extremes_are_true() -> None:
    mine = torch.tensor([hvd.rank() + 1.0, 0.0, -hvd.rank()])
    product = gradient(partial(hvd.allreduce, op=hvd.Product), mine)
    assert torch.equal(product, SUM * torch.tensor([6 / (hvd.rank() + 1), 0, {0: 2.0, 1: 0.0, 2: 0.0}[hvd.rank()]]))
    most = gradient(partial(hvd.allreduce, op=hvd.Max, prescale_factor=2.0), mine)
    assert torch.equal(most, 2 * SUM * torch.tensor([hvd.rank() == 2, 1 / RANKS, hvd.rank() == 0]))
    least = gradient(lambda x: hvd.reducescatter(x, op=hvd.Min), mine)
    assert torch.equal(least, torch.tensor([1.0 * (hvd.rank() == 0), weight(1) / RANKS, weight(2) * (hvd.rank() == 2)]))


def gradients_of_a_broadcast_are_averaged_on_its_root() -> None:
    got = gradient(partial(hvd.broadcast, root_rank=1), of_rank(hvd.rank()))
    assert torch.equal(got, torch.full((2, 3), MEAN if hvd.rank() == 1 else 0.0))


def gradients_of_rows_go_back() -> None:
    mine = of_rank(hvd.rank(), rows=hvd.rank() + 1)
    assert torch.equal(gradient(hvd.allgather, mine), torch.full_like(mine, MEAN))
    assert torch.equal(gradient(lambda x: hvd.grouped_allgather([mine, x])[1], mine), torch.full_like(mine, MEAN))
    places = gradient(lambda x: hvd.allgather(x) * torch.arange(6.0)[:, None], mine)
    first = sum(range(hvd.rank() + 1))
    assert torch.equal(places, MEAN * torch.arange(6.0)[first : first + hvd.rank() + 1, None].expand_as(mine))
    sent = gradient(hvd.alltoall, torch.ones(RANKS))
    assert torch.equal(sent, torch.tensor([weight(rank) for rank in range(RANKS)]))
    sent = gradient(lambda x: hvd.alltoall(x, splits=[2, 0, 1])[0], torch.ones(3))
    assert torch.equal(sent, torch.tensor([weight(0), weight(0), weight(2)]))
    of_rows = torch.tensor([weight(0), weight(0), weight(1), weight(2)])
    whole = torch.arange(4.0)
    assert torch.equal(gradient(hvd.reducescatter, whole), of_rows)
    assert torch.equal(gradient(partial(hvd.reducescatter, op=hvd.Sum), whole), of_rows * RANKS)
    scaled = partial(hvd.reducescatter, prescale_factor=0.5, postscale_factor=3)
    assert torch.equal(gradient(scaled, whole), of_rows * 1.5)
    assert torch.equal(gradient(lambda x: hvd.grouped_reducescatter([whole, x])[1], whole), of_rows)


def integers_are_scaled_in_float64() -> None:
    mine = torch.tensor([3, -3, 2**40 + 1]) + hvd.rank()
    halves = [sum(int((value + rank) * 0.5) for rank in range(RANKS)) for value in (3, -3, 2**40 + 1)]
    assert hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5).tolist() == halves
    total = [3 * value + 3 for value in (3, -3, 2**40 + 1)]
    assert hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.3).tolist() == [int(value * 0.3) for value in total]
    assert hvd.allreduce(mine, postscale_factor=1.5).tolist() == [int(value * (1.5 / 3)) for value in total]
    shares = hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=0.5)
    assert shares.tolist() == halves[hvd.rank() : hvd.rank() + 1]
    (flags,) = hvd.grouped_allreduce([torch.tensor([7], dtype=torch.uint8)], op=hvd.Sum, prescale_factor=0.5)
    assert flags.tolist() == [9]


def sparse_tensors_are_added() -> None:
    mine = torch.zeros(5, 2)
    mine[: hvd.rank()] = hvd.rank()
    expected = torch.tensor([3.0, 2.0, 0, 0, 0])[:, None].expand(5, 2)
    total = hvd.sparse_allreduce_async(mine.to_sparse(), name="sparse", op=hvd.Sum)
    mean = hvd.sparse_allreduce_async(mine.to_sparse(), name="other", op=hvd.Average)
    assert torch.equal(total().to_dense(), expected)
    torch.testing.assert_close(mean().to_dense(), expected / RANKS)
    with pytest.raises(ValueError, match="Sum or Average; got MAX"):
        hvd.sparse_allreduce_async(mine.to_sparse(), None, hvd.Max)
    with pytest.raises(ValueError, match="sparse COO"):
        hvd.sparse_allreduce_async(mine, None, hvd.Sum)


def asynchronous_calls_end_in_order() -> None:
    mine = of_rank(hvd.rank())
    gathered = hvd.grouped_allgather_async([mine, mine[:1]], name="gathered")
    scattered = hvd.grouped_reducescatter_async([torch.arange(4.0)], op=hvd.Sum)
    exchanged = hvd.alltoall_async(torch.full((RANKS,), hvd.rank()))
    reduced = hvd.allreduce(mine, op=hvd.Sum)
    assert hvd.poll(gathered)
    assert torch.equal(reduced, sum(everybodys()))
    assert torch.equal(hvd.synchronize(gathered)[1], torch.cat([of_rank(rank)[:1] for rank in range(RANKS)]))
    assert hvd.synchronize(scattered)[0].tolist() == [[0.0, 3.0], [6.0], [9.0]][hvd.rank()]
    rows, counts = hvd.synchronize(exchanged)
    assert (rows.tolist(), counts.tolist(), counts.dtype) == ([0, 1, 2], [1, 1, 1], torch.int32)


def a_barrier_overtakes_calls_under_way() -> None:
    mine = torch.ones(3)
    handle = hvd.allreduce_async(mine, name="early", op=hvd.Sum) if hvd.rank() == 0 else None
    hvd.barrier()
    handle = handle or hvd.allreduce_async(mine, name="early", op=hvd.Sum)
    assert torch.equal(hvd.synchronize(handle), torch.full((3,), float(RANKS)))
    with pytest.raises(hvd.HorovodInternalError, match="called allreduce.*called barrier"):
        hvd.synchronize(hvd.allreduce_async(mine)) if hvd.rank() == 0 else hvd.barrier()
    hvd.barrier()


def a_name_is_given_once_at_a_time() -> None:
    begin = {
        "allreduce": hvd.allreduce_async,
        "allgather": hvd.allgather_async,
        "broadcast": partial(hvd.broadcast_async, root_rank=0),
        "alltoall": hvd.alltoall_async,
        "reducescatter": hvd.reducescatter_async,
    }
    mine = torch.ones(RANKS)
    handles = {kind: call(mine, name="same") for kind, call in begin.items()}
    for kind, call in begin.items():
        with pytest.raises(ValueError, match=f"(?s){kind}.*'same'.* has the name of an earlier call"):
            call(mine, name="same")
    for handle in handles.values():
        hvd.synchronize(handle)
    hvd.synchronize(hvd.allreduce_async(mine, name="same"))
    hvd.allreduce_async(mine, name="forgotten")
    hvd.allreduce(mine)  # this call runs after the other one, which has therefore completed
    hvd.allreduce(mine, name="forgotten")


def calls_that_differ_are_refused_and_the_next_ones_work() -> None:
    me = hvd.rank()
    with pytest.raises(hvd.HorovodInternalError, match=r"\[6, 2\].*\[4, 3\]|\[4, 3\].*\[6, 2\]"):
        hvd.allreduce(torch.ones(*((6, 2) if me == 1 else (4, 3))))
    with pytest.raises(hvd.HorovodInternalError, match="name='a'.*name='b'|name='b'.*name='a'"):
        hvd.allreduce(torch.ones(3), name="a" if me == 0 else "b")
    with pytest.raises(hvd.HorovodInternalError, match="float32.*int64|int64.*float32"):
        hvd.grouped_allgather([torch.ones(1), torch.ones(1, dtype=torch.float32 if me else torch.int64)])
    with pytest.raises(hvd.HorovodInternalError, match="root_rank=0.*root_rank=1"):
        hvd.broadcast(torch.ones(1), root_rank=min(me, 1))
    with pytest.raises(hvd.HorovodInternalError, match="ranks .* called allreduce.*called reducescatter"):
        hvd.allreduce(torch.ones(RANKS)) if me == 0 else hvd.reducescatter(torch.ones(RANKS))
    with pytest.raises(hvd.HorovodInternalError, match="op=SUM"):
        hvd.synchronize(hvd.allreduce_async(torch.ones(1), op=hvd.Sum if me else hvd.Average))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == RANKS


def ranks_that_have_joined_contribute_zeros() -> None:
    for last in (2, 0):
        joined_first = (last + 1) % RANKS
        if hvd.rank() == joined_first:
            ended = hvd.join()
        else:
            assert hvd.allreduce(torch.full((4,), 6)).tolist() == [4] * 4
            both = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int64)], op=hvd.Sum)
            assert [each.tolist() for each in both] == [[2.0] * 2, [2] * 3]
            if hvd.rank() != last:
                early = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
            hvd.barrier()
            if hvd.rank() == last:
                early = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
            assert hvd.synchronize(early).item() == 2
            with pytest.raises(hvd.HorovodInternalError, match=rf"ranks \[{joined_first}\] wait in join"):
                hvd.allgather(torch.ones(1))
            with pytest.raises(hvd.HorovodInternalError, match=r"wait in join.*broadcast_object"):
                hvd.broadcast_object(1)
            if hvd.rank() == last:
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 1
            ended = hvd.join()
        assert ended == last
        assert hvd.allgather_object(ended) == [last] * RANKS


def trainings_of_different_lengths_join() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(RANKS):
        plain.zero_grad()
        for rank in range(step, RANKS):  # rank r has r + 1 batches
            inputs, targets = batches(step, rank)
            (mse_loss(alone(inputs), targets) / RANKS).backward()
        plain.step()
        if step > hvd.rank():
            continue
        inputs, targets = batches(step, hvd.rank())
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert hvd.join() == RANKS - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=RANKS - 1)
    torch.testing.assert_close(model.weight, alone.weight)


def steps_by_a_closure_are_those_of_one_process(name: str, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    reference = copy.deepcopy(model)
    make = getattr(torch.optim, name)
    optimizer = hvd.DistributedOptimizer(make(model.parameters(), **options), model.named_parameters())
    alone = make(reference.parameters(), **options)

    def mine() -> torch.Tensor:
        optimizer.zero_grad()
        inputs, targets = batches(0, hvd.rank())
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    def everything() -> torch.Tensor:
        alone.zero_grad()
        losses = [mse_loss(reference(inputs), targets) for inputs, targets in (batches(0, r) for r in range(RANKS))]
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss

    for _ in range(2):
        torch.testing.assert_close(optimizer.step(mine), alone.step(everything).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-3, atol=1e-4)
    weights = hvd.allgather(model.weight.detach()[None])
    assert all(torch.equal(each, weights[0]) for each in weights)
    with optimizer.skip_synchronize(), pytest.raises(ValueError, match="not reduced"):
        optimizer.step(mine)
    optimizer.synchronize()


def rows_of_different_numbers_are_gathered() -> None:
    mine = of_rank(hvd.rank(), rows=hvd.rank() + 1)
    expected = torch.cat([of_rank(rank, rows=rank + 1) for rank in range(RANKS)])
    assert torch.equal(hvd.allgather(mine), expected)
    assert torch.equal(hvd.synchronize(hvd.allgather_async(mine)), expected)
    with pytest.raises(ValueError, match="without dimensions"):
        hvd.allgather(torch.tensor(1.0))


def rows_go_to_each_rank() -> None:
    mine = torch.arange(RANKS) + 10 * hvd.rank()
    assert hvd.alltoall(mine).tolist() == [10 * rank + hvd.rank() for rank in range(RANKS)]
    rows, counts = hvd.alltoall(torch.full((RANKS + 1,), hvd.rank()), splits=[2, *[1] * (RANKS - 1)])
    share = 2 if hvd.rank() == 0 else 1
    assert counts.tolist() == [share] * RANKS
    assert rows.tolist() == [rank for rank in range(RANKS) for _ in range(share)]
    with pytest.raises(ValueError, match="pass splits"):
        hvd.alltoall(torch.ones(RANKS + 1))


def rows_are_reduced_and_shared() -> None:
    mine = torch.arange(4.0) + hvd.rank()
    shares = [[0, 1], [2], [3]]
    expected = torch.tensor([float(i) for i in shares[hvd.rank()]]) * RANKS + 3
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), expected)
    even, uneven = hvd.grouped_reducescatter([torch.ones(RANKS, 2), mine])
    assert torch.equal(even, torch.ones(1, 2))
    torch.testing.assert_close(uneven, expected / RANKS)
    with pytest.raises(ValueError, match="without dimensions"):
        hvd.reducescatter(torch.tensor(1.0))


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
    with pytest.raises(NotImplementedError, match="Adasum adds gradients pairwise"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="Adasum adds gradients pairwise"):
        hvd.reducescatter(torch.ones(1), op=hvd.Adasum)
    with pytest.raises(ValueError, match="both op and average"):
        hvd.allreduce(torch.ones(1), op=hvd.Sum, average=True)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(TypeError, match=r"an object of type list; convert it to a tensor: torch.as_tensor"):
            call([1, 2])
    with pytest.raises(TypeError, match="grouped_allreduce got an object of type float"):
        hvd.grouped_allreduce([torch.ones(1), 2.0])
    for broadcast in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async):
        with pytest.raises(TypeError, match="broadcast got an object of type float"):
            broadcast(1.0, root_rank=0)
    with pytest.raises(AttributeError, match="paceline.ElasticState"):
        hvd.elastic  # noqa: B018
    with pytest.raises(ValueError, match="does not support comm"):
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


def parameters_that_come_later_are_reduced() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[:2].parameters(), lr=0.1), model[:2].named_parameters())
    for step in range(3):
        if step == 1:
            model[0].weight.requires_grad_(True)
            optimizer.add_param_group({"params": list(model[2].parameters())})
        optimizer.zero_grad()
        inputs, targets = batches(step, hvd.rank())
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if step == 0:
            model[2].zero_grad()
    for param in model.parameters():
        assert torch.equal(hvd.broadcast(param.detach(), 0), param)


def loaded_state_begins_a_new_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = copy.deepcopy(optimizer.state_dict())
    for inputs in (torch.full((1, 3), torch.inf), torch.ones(1, 3)):
        optimizer.load_state_dict(state)  # after a backward pass whose gradients are not used
        optimizer.zero_grad()
        model(inputs).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.grad, torch.ones(2, 3))


def errors_of_a_step_begin_a_new_one() -> None:
    model = nn.Linear(3, 2 + (hvd.rank() == 0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(hvd.HorovodInternalError, match=r"allreduce\(float32 \[3\], float32 \[3, 3\]"):
            optimizer.step()


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
    with pytest.raises(ValueError, match="positive number of groups"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), groups=0)
    with pytest.raises(ValueError, match="a parameter twice"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), groups=[[model.weight], [model.weight]])
    with pytest.raises(ValueError, match="occur twice: a"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), [("a", p) for p in model.parameters()])


_FP16 = {"compression": hvd.Compression.fp16}

_WORLD = OneWorld(
    ranks_are_numbered,
    all_reduces_return_new_tensors,
    all_reduces_write_in_place,
    gradients_of_all_reduces_are_reduced,
    gradients_of_products_and_extremes_are_true,
    gradients_of_a_broadcast_are_averaged_on_its_root,
    gradients_of_rows_go_back,
    integers_are_scaled_in_float64,
    sparse_tensors_are_added,
    asynchronous_calls_end_in_order,
    a_barrier_overtakes_calls_under_way,
    a_name_is_given_once_at_a_time,
    calls_that_differ_are_refused_and_the_next_ones_work,
    ranks_that_have_joined_contribute_zeros,
    trainings_of_different_lengths_join,
    partial(steps_by_a_closure_are_those_of_one_process, "SGD", {"lr": 0.1, "momentum": 0.9}),
    partial(steps_by_a_closure_are_those_of_one_process, "LBFGS", {"line_search_fn": "strong_wolfe"}),
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
    parameters_that_come_later_are_reduced,
    loaded_state_begins_a_new_step,
    errors_of_a_step_begin_a_new_one,
    mistakes_around_a_step_are_said,
)


@pytest.mark.parametrize("name", _WORLD.programs)
def test_horovods_calls(name):
    _WORLD.require(RANKS, name)


def test_join_allocates_on_the_device_of_the_program_unless_told(monkeypatch):
    devices: list[int] = []
    queue = CallQueue(SimpleNamespace(size=lambda: 1))
    monkeypatch.setattr(queue, "_join", lambda group, device: devices.append(device))
    queue.join(-1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    queue.join(-1)
    queue.join(1)
    assert devices == [-1, 3, 1]
