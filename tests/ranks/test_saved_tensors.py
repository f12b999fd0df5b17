"""Calls that overwrite a tensor needed by a backward pass; backward raises an error in the same cases as with gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from one_world import merged, require, run_in_turn
from torch import nn
from torch_programs import torch_group

import paceline
from paceline.comm.group.collectives import persistent as persistent_module

COUNT = 4
BIG = 70_001


@dataclass
class Case:
    """A call, the tensors that it writes, and those that it only reads."""

    make: Callable[[], object]
    written: Sequence[torch.Tensor]
    read: Sequence[torch.Tensor] = ()


def new(count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), float(os.environ["RANK"]) + 2)


def some(count: int = COUNT) -> list[torch.Tensor]:
    return [new(count), new(count)]


def is_root() -> bool:
    return os.environ["RANK"] == "0"


def all_reduce(dist: Any, count: int, **options: Any) -> Case:
    return Case(lambda: dist.all_reduce(tensor, **options), [tensor := new(count)])


def all_reduce_strided(dist: Any, **options: Any) -> Case:
    return Case(lambda: dist.all_reduce(tensor, **options), [tensor := new(2 * COUNT)[::2]])


def all_reduce_of_a_detached(dist: Any, **options: Any) -> Case:
    return Case(lambda: dist.all_reduce(tensor.detach(), **options), [tensor := new()])


def broadcast(dist: Any, **options: Any) -> Case:
    tensor = new()
    make = partial(dist.broadcast, tensor, 0, **options)
    return Case(make, [], [tensor]) if is_root() else Case(make, [tensor])


def reduce(dist: Any, **options: Any) -> Case:
    tensor = new()
    make = partial(dist.reduce, tensor, 0, **options)
    return Case(make, [tensor]) if is_root() else Case(make, [], [tensor])


def all_gather(dist: Any, **options: Any) -> Case:
    return Case(lambda: dist.all_gather(outputs, mine, **options), outputs := some(), [mine := new()])


def all_gather_into_tensor(dist: Any, **options: Any) -> Case:
    output, mine = new(2 * COUNT), new()
    return Case(lambda: dist.all_gather_into_tensor(output, mine, **options), [output], [mine])


def gather(dist: Any, **options: Any) -> Case:
    outputs, mine = some() if is_root() else [], new()
    return Case(lambda: dist.gather(mine, outputs or None, 0, **options), outputs, [mine])


def scatter(dist: Any, **options: Any) -> Case:
    inputs, mine = some() if is_root() else [], new()
    return Case(lambda: dist.scatter(mine, inputs or None, 0, **options), [mine], inputs)


def reduce_scatter(dist: Any, **options: Any) -> Case:
    return Case(lambda: dist.reduce_scatter(mine, inputs, **options), [mine := new()], inputs := some())


def reduce_scatter_tensor(dist: Any, **options: Any) -> Case:
    mine, whole = new(), new(2 * COUNT)
    return Case(lambda: dist.reduce_scatter_tensor(mine, whole, **options), [mine], [whole])


def all_to_all(dist: Any, **options: Any) -> Case:
    return Case(lambda: dist.all_to_all(outputs, inputs, **options), outputs := some(), inputs := some())


def all_to_all_single(dist: Any, **options: Any) -> Case:
    return Case(lambda: dist.all_to_all_single(output, mine, **options), [output := new()], [mine := new()])


def all_reduce_coalesced(dist: Any, **options: Any) -> Case:
    return Case(lambda: dist.all_reduce_coalesced(tensors, **options), tensors := some())


def all_gather_coalesced(dist: Any, **options: Any) -> Case:
    outputs, mine = [some(), some()], some()
    return Case(lambda: dist.all_gather_coalesced(outputs, mine, **options), [*outputs[0], *outputs[1]], mine)


def message(dist: Any) -> Case:
    tensor = new()
    if is_root():
        return Case(lambda: dist.send(tensor, 1), [], [tensor])
    return Case(lambda: dist.recv(tensor, 0), [tensor])


def message_from_any(dist: Any) -> Case:
    tensor = new()
    if is_root():
        return Case(lambda: dist.send(tensor, 1), [], [tensor])
    return Case(lambda: dist.recv(tensor), [tensor])


def messages_at_once(dist: Any) -> Case:
    there, mine, other = new(), new(), 1 - int(os.environ["RANK"])

    def make() -> None:
        ops = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, there, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return Case(make, [there], [mine])


def asynchronously(case: Case) -> Case:
    def make() -> None:
        work = case.make()
        assert work is not None
        work.wait()

    return Case(make, case.written, case.read)


COMMON: dict[str, Callable[[Any], Case]] = {
    name: call
    for made in (
        partial(all_reduce, count=1),
        partial(all_reduce, count=BIG),
        all_reduce_strided,
        all_reduce_of_a_detached,
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        all_reduce_coalesced,
        all_gather_coalesced,
    )
    for name, call in (
        (f"{getattr(made, 'func', made).__name__}{getattr(made, 'keywords', {}).get('count', '')}", made),
        (
            f"{getattr(made, 'func', made).__name__}{getattr(made, 'keywords', {}).get('count', '')} async",
            lambda dist, made=made: asynchronously(made(dist, async_op=True)),
        ),
    )
} | {each.__name__: each for each in (message, message_from_any, messages_at_once)}


def methods_for_lists() -> dict[str, Callable[[Any], Case]]:
    """Returns the methods of torch's groups that have no corresponding function."""

    def group(dist: Any) -> Any:
        return dist.group.WORLD

    def gathered(dist: Any) -> Case:
        outputs, mine = [new(2 * COUNT), new(2 * COUNT)], some()
        return asynchronously(Case(lambda: group(dist).allgather_into_tensor_coalesced(outputs, mine), outputs, mine))

    def scattered(dist: Any) -> Case:
        mine, wholes = some(), [new(2 * COUNT), new(2 * COUNT)]
        return asynchronously(Case(lambda: group(dist).reduce_scatter_tensor_coalesced(mine, wholes), mine, wholes))

    def reduced(dist: Any) -> Case:
        return asynchronously(Case(lambda: group(dist).allreduce_coalesced(tensors), tensors := some()))

    return {"method gathered": gathered, "method scattered": scattered, "method reduced": reduced}


METHODS = methods_for_lists()


def persistent(init: Callable[..., Any], case: Case, *arguments: object, started: bool) -> Case:
    call = init(*arguments)

    def make() -> None:
        if started:
            call.start()
            call.wait()
        else:
            call()

    return Case(make, case.written, case.read)


def persistent_cases(started: bool) -> dict[str, Callable[[Any], Case]]:
    def case(name: str, dist: Any) -> Case:
        tensor, outputs, inputs, whole = new(), some(), some(), new(2 * COUNT)
        shorter = partial(persistent, started=started)
        both = not is_root()
        chosen: dict[str, Callable[[], Case]] = {
            "all_reduce": lambda: shorter(persistent_module.all_reduce_init, Case(print, [tensor]), tensor),
            "all_gather": lambda: shorter(
                persistent_module.all_gather_init, Case(print, outputs, [tensor]), outputs, tensor
            ),
            "all_gather_into_tensor": lambda: shorter(
                persistent_module.all_gather_into_tensor_init, Case(print, [whole], [tensor]), whole, tensor
            ),
            "reduce_scatter": lambda: shorter(
                persistent_module.reduce_scatter_init, Case(print, [tensor], inputs), tensor, inputs
            ),
            "broadcast": lambda: shorter(
                persistent_module.broadcast_init, Case(print, [tensor] * both, [tensor] * (not both)), tensor, 0
            ),
            "reduce": lambda: shorter(
                persistent_module.reduce_init, Case(print, [tensor] * (not both), [tensor] * both), tensor, 0
            ),
        }
        return chosen[name]()

    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast", "reduce")
    return {f"persistent {name}{' started' * started}": partial(case, name) for name in names}


PERSISTENT = persistent_cases(False) | persistent_cases(True)


def backward_raises(tensor: torch.Tensor) -> Callable[[], bool]:
    """Saves a tensor in autograd; returns a function that returns True if the backward pass then raises."""
    factor = torch.ones(tensor.shape, requires_grad=True)
    loss = (factor * tensor).sum()

    def raises() -> bool:
        try:
            loss.backward()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return True
        return False

    return raises


def outcomes(dist: Any, make: Callable[[Any], Case]) -> tuple[list[bool], list[bool]]:
    """Returns True for each written and each read tensor for which the backward pass raises."""
    case = make(dist)
    written, read = [backward_raises(each) for each in case.written], [backward_raises(each) for each in case.read]
    case.make()
    return [each() for each in written], [each() for each in read]


def compare(directory: str) -> dict[str, str]:
    os.environ["PACELINE_SECRET"] = "ab" * 16
    theirs: dict[str, tuple[list[bool], list[bool]]] = {}
    with torch_group("gloo", directory):
        for name, make in (COMMON | METHODS).items():
            theirs[name] = outcomes(torch_dist, make)

    def check(dist: Any, name: str, make: Callable[[Any], Case]) -> None:
        written, read = outcomes(dist, make)
        assert all(written), f"the backward used what {name} had overwritten: {written}"
        assert not any(read), f"the backward raised for what {name} only read: {read}"
        gloos = theirs.get(name, ([], []))
        assert not any(gloos[1])
        assert len(gloos[0]) in (0, len(written))  # so that ours raises wherever gloo's does

    with torch_group("paceline", directory):
        reports = run_in_turn(
            {f"plugin {name}": partial(check, torch_dist, name, make) for name, make in (COMMON | METHODS).items()}
        )
    paceline.init_process_group()
    ours = COMMON | METHODS | PERSISTENT
    reports |= run_in_turn({f"native {name}": partial(check, paceline, name, make) for name, make in ours.items()})
    paceline.destroy_process_group()
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    from world import Ranks

    return merged(Ranks(2)(compare, str(tmp_path_factory.mktemp("saved")), timeout_s=110))


@pytest.mark.parametrize(
    "name",
    [
        *(f"plugin {name}" for name in COMMON | METHODS),
        *(f"native {name}" for name in COMMON | METHODS | PERSISTENT),
    ],
)
def test_a_backward_raises_for_what_a_call_has_overwritten(reports, name):
    require(reports, name)


def forward_twice() -> None:
    """Like torch's, DistributedDataParallel sends buffers without bumping their versions: batch norm saves buffers."""
    paceline.init_process_group()
    torch.manual_seed(1)
    model = paceline.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    (model(torch.randn(5, 3)).square().sum() + model(torch.randn(5, 3)).square().sum()).backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())


def test_two_forwards_before_a_backward_are_no_error(ranks):
    ranks(2)(forward_twice)


def step_between(make: Callable[[nn.Module], Any]) -> None:
    paceline.init_process_group()
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    optimizer = make(module)
    module(torch.randn(5, 3)).sum().backward()
    loss = module(torch.randn(5, 3)).square().sum()
    optimizer.step()  # each rank updates a part and receives the rest
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def zero(stage: int, module: nn.Module) -> Any:
    return paceline.ZeroRedundancyOptimizer(module, torch.optim.SGD, lr=0.1, stage=stage)


def one_copy(module: nn.Module) -> Any:
    return paceline.SharedModelOptimizer(module, torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("make", [partial(zero, 1), one_copy], ids=["stage 1", "one copy"])
def test_a_backward_raises_after_a_step_of_all_ranks(ranks, make):
    ranks(2)(step_between, make)


def load_between(directory: str) -> None:
    paceline.init_process_group()
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    with paceline.CheckpointManager(directory) as manager:
        assert manager.save(1, {"model": module}, force=True)
    loss = module(torch.randn(5, 3)).square().sum()
    with paceline.CheckpointManager(directory) as manager:
        assert manager.restore({"model": module}) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_raises_after_the_parameters_were_loaded(ranks, tmp_path):
    ranks(2)(load_between, str(tmp_path))
