"""paceline.functional: values, gradients and second derivatives equal those from one process with all ranks' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed.nn.functional as torchs
from torch_programs import agree, torch_group

import paceline as dist
from paceline.comm import functional

Tensors = Sequence[torch.Tensor]
SHAPE = (3, 2)
ROOT = 1


@dataclass(frozen=True)
class Case:
    """A call on a rank, and a reference that computes all ranks' results; `inputs` is the number of input tensors."""

    name: str
    call: Callable[[Tensors, int, int], Tensors]
    reference: Callable[[Sequence[Tensors]], Sequence[Tensors]]
    inputs: int | None = 1  # None means one per rank
    rows: int = 3


def _reduced(values: Tensors, op: dist.ReduceOp) -> torch.Tensor:
    stacked = torch.stack(list(values))
    return {
        dist.ReduceOp.SUM: stacked.sum,
        dist.ReduceOp.AVG: stacked.mean,
        dist.ReduceOp.PRODUCT: stacked.prod,
        dist.ReduceOp.MIN: stacked.amin,
        dist.ReduceOp.MAX: stacked.amax,
    }[op](0)


def _only_on_root(results: Tensors, size: int) -> list[Tensors]:
    zeros = [torch.zeros_like(result) for result in results]
    return [results if rank == ROOT else zeros for rank in range(size)]


def _reductions(op: dist.ReduceOp) -> list[Case]:
    return [
        Case(
            f"all_reduce {op.name}",
            lambda x, rank, size: [functional.all_reduce(x[0], op)],
            lambda all_: [[_reduced([x[0] for x in all_], op)]] * len(all_),
        ),
        Case(
            f"reduce {op.name}",
            lambda x, rank, size: [functional.reduce(x[0], ROOT, op)],
            lambda all_: _only_on_root([_reduced([x[0] for x in all_], op)], len(all_)),
        ),
        Case(
            f"reduce_scatter {op.name}",
            lambda x, rank, size: [functional.reduce_scatter(torch.empty_like(x[0]), x, op)],
            lambda all_: [[_reduced([x[rank] for x in all_], op)] for rank in range(len(all_))],
            inputs=None,
        ),
        Case(
            f"reduce_scatter of other shapes {op.name}",
            lambda x, rank, size: [
                functional.reduce_scatter(torch.empty_like(x[rank][rank:]), [y[r:] for r, y in enumerate(x)], op)
            ],
            lambda all_: [[_reduced([x[rank][rank:] for x in all_], op)] for rank in range(len(all_))],
            inputs=None,
        ),
        Case(
            f"reduce_scatter_tensor {op.name}",
            lambda x, rank, size: [functional.reduce_scatter_tensor(torch.empty_like(x[0][:3]), x[0], op)],
            lambda all_: [[_reduced([x[0][3 * rank : 3 * rank + 3] for x in all_], op)] for rank in range(len(all_))],
            rows=9,
        ),
    ]


def _all_to_all(x: Tensors, rank: int, size: int) -> Tensors:
    buffer = x[0].new_empty(size, *x[0].shape)
    results = functional.all_to_all(list(buffer.unbind(0)), x)
    assert torch.equal(torch.stack(results), buffer)
    return results


def _uneven(x: Tensors, rank: int, size: int) -> Tensors:
    sent = [rank, 9 - 2 * rank, rank]  # rank r keeps r, 9 - 2 r or r rows
    received = [[0, 9, 0], [1, 7, 1], [2, 5, 2]]
    rows = [received[peer][rank] for peer in range(size)]
    output = x[0].new_empty(sum(rows), 2)
    assert functional.all_to_all_single(output, x[0], rows, sent) is output
    return [output]


def _uneven_reference(all_: Sequence[Tensors]) -> list[Tensors]:
    split = [x[0].split([rank, 9 - 2 * rank, rank]) for rank, x in enumerate(all_)]
    return [[torch.cat([parts[rank] for parts in split])] for rank in range(len(all_))]


CASES = [
    *(case for op in list(dist.ReduceOp)[:5] for case in _reductions(op)),
    Case(
        "all_reduce PremulSum",
        lambda x, rank, size: [functional.all_reduce(x[0], dist.PremulSum(rank + 2.0))],
        lambda all_: [[sum(x[0] * (rank + 2.0) for rank, x in enumerate(all_))]] * len(all_),
    ),
    Case(
        "broadcast",
        lambda x, rank, size: [functional.broadcast(x[0], ROOT)],
        lambda all_: [[all_[ROOT][0]]] * len(all_),
    ),
    Case(
        "all_gather",
        lambda x, rank, size: functional.all_gather(x[0].t()),
        lambda all_: [[x[0].t() for x in all_]] * len(all_),
    ),
    Case(
        "all_gather_into_tensor",
        lambda x, rank, size: [functional.all_gather_into_tensor(x[0].new_empty(3 * size, 2), x[0])],
        lambda all_: [[torch.cat([x[0] for x in all_])]] * len(all_),
    ),
    Case(
        "gather",
        lambda x, rank, size: functional.gather(x[0], ROOT),
        lambda all_: _only_on_root([x[0] for x in all_], len(all_)),
    ),
    Case(
        "scatter",
        lambda x, rank, size: [functional.scatter(x, ROOT)],
        lambda all_: [[each] for each in all_[ROOT]],
        inputs=None,
    ),
    Case(
        "all_to_all",
        _all_to_all,
        lambda all_: [[x[rank] for x in all_] for rank in range(len(all_))],
        inputs=None,
    ),
    Case("all_to_all_single", _uneven, _uneven_reference, rows=9),
]


def _inputs(case: Case, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    count = size if case.inputs is None else case.inputs
    made = [torch.randn(case.rows, 2, generator=generator, dtype=dtype) for _ in range(count)]
    for tensor in made:
        tensor[0, 0] = 2.0  # equal on all ranks
        tensor[1, 0] = 0.0 if rank else 1.0  # zeros on several ranks
        tensor[1, 1] = 0.0 if rank == 1 else 3.0
    return [tensor.requires_grad_() for tensor in made]


def _loss(results: Tensors, rank: int) -> torch.Tensor:
    """Returns a rank's loss, which differs between ranks and has second derivatives."""
    total = torch.zeros((), dtype=results[0].dtype)
    for at, result in enumerate(results):
        weights = torch.arange(1.0, result.numel() + 1, dtype=result.dtype).view(result.shape) + at + rank
        total = total + (weights * result).sum() + (result**3).sum()
    return total


def _derivatives(loss: torch.Tensor, inputs: Tensors) -> tuple[Tensors, Tensors]:
    first = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum((each**2).sum() for each in first), inputs, materialize_grads=True)
    return first, second


def _check(case: Case, dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [_inputs(case, each, size, dtype) for each in range(size)]
    wanted = case.reference(everyone)
    flat = [tensor for inputs in everyone for tensor in inputs]
    losses = [_loss(results, each) for each, results in enumerate(wanted)]
    wanted_first, wanted_second = _derivatives(torch.stack(losses).sum(), flat)
    count = len(everyone[0])
    mine = slice(rank * count, (rank + 1) * count)

    inputs = _inputs(case, rank, size, dtype)
    results = case.call(inputs, rank, size)
    first, second = _derivatives(_loss(results, rank), inputs)
    for what, seen, expected in (
        ("value", results, wanted[rank]),
        ("gradient", first, wanted_first[mine]),
        ("second derivative", second, wanted_second[mine]),
    ):
        for one, other in zip(seen, expected, strict=True):
            torch.testing.assert_close(one, other, msg=f"{what} is {one.tolist()}, not {other.tolist()}")


def derivatives_are_those_of_one_process() -> dict[str, str]:
    dist.init_process_group()
    failed = {}
    for case in CASES:
        try:
            _check(case, torch.float64)
        except AssertionError as error:
            failed[case.name] = str(error)
    return failed


def test_derivatives_are_those_of_one_process(ranks):
    assert ranks(3)(derivatives_are_those_of_one_process) == [{}] * 3


def call_every_form() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    _other_types(rank, size)
    _the_source_decides(rank)
    _output_itself_has_the_gradient(rank, size)
    _refusals(rank, size)
    _compiled(rank, size)
    _groups(rank)


def _other_types(rank: int, size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        x = torch.full((2,), rank + 1, dtype=dtype, requires_grad=True)
        functional.all_reduce(x * 2).abs().sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((2,), 2 * size, dtype=dtype))
    integers = torch.tensor([rank, 3])
    assert functional.all_reduce(integers, dist.ReduceOp.MAX).tolist() == [size - 1, 3] and integers[0] == rank
    assert functional.all_reduce(integers, dist.ReduceOp.BOR)[1] == 3
    with torch.no_grad():
        assert not functional.all_reduce(torch.ones(2, requires_grad=True), dist.ReduceOp.PRODUCT).requires_grad


def _the_source_decides(rank: int) -> None:
    x = torch.full((2,), 5.0, requires_grad=rank == ROOT)
    result = functional.broadcast(x, ROOT)
    (result * (rank + 1)).sum().backward()
    assert x.grad is None if rank != ROOT else x.grad.tolist() == [6.0, 6.0]
    assert not functional.broadcast(torch.ones(1, requires_grad=rank != ROOT), ROOT).requires_grad

    given = [torch.full((2, 2), float(each), requires_grad=True) for each in range(3)] if rank == ROOT else None
    part = functional.scatter(given, ROOT)
    assert part.tolist() == [[rank, rank]] * 2
    (part * (rank + 1)).sum().backward()
    if given is not None:
        assert [each.grad[0, 0].item() for each in given] == [1.0, 2.0, 3.0]
    assert functional.scatter([torch.tensor(each) for each in range(3)] if rank == 0 else None).item() == rank


def _output_itself_has_the_gradient(rank: int, size: int) -> None:
    x = torch.ones(2 * size, requires_grad=True)
    buffer = torch.zeros(4)
    output = buffer[:2]
    assert functional.reduce_scatter_tensor(output, x * 1) is output
    assert buffer.tolist() == [size, size, 0, 0]
    (output * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def _refusals(rank: int, size: int) -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=f"one tensor for each of the {size} ranks"):
        functional.reduce_scatter(torch.empty(3), [x])
    with pytest.raises(ValueError, match=rf"with index {rank} must have the output's shape \[2\]; got \[\[3\], \[3\]"):
        functional.reduce_scatter(torch.empty(2), [x] * size)
    with pytest.raises(ValueError, match=f"scatter needs one tensor for each .* on rank {ROOT}"):
        functional.scatter([x], ROOT)
    with pytest.raises(TypeError, match="MAX is not defined for torch.complex64"):
        functional.all_reduce(torch.ones(3, dtype=torch.complex64, requires_grad=True), dist.ReduceOp.MAX)
    with pytest.raises(TypeError, match="BAND is not defined for torch.float32"):
        functional.all_reduce(x, dist.ReduceOp.BAND)
    if rank == 0:
        with pytest.raises(dist.CollectiveMismatchError, match="all_gather.*all_reduce"):
            functional.all_reduce(x, dist.ReduceOp.MAX)
    else:
        with pytest.raises(dist.CollectiveMismatchError, match="all_gather.*all_reduce"):
            functional.all_reduce(x.detach(), dist.ReduceOp.MAX)


def _compiled(rank: int, size: int) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (functional.all_reduce(x * 2) * (rank + 1)).sum() * 3

    x = torch.ones(2, requires_grad=True)
    torch.compile(step, backend="aot_eager")(x).backward()
    assert x.grad.tolist() == [36.0, 36.0]


def _groups(rank: int) -> None:
    pair = dist.new_group([2, 0])
    x = torch.tensor([float(rank)], requires_grad=True)
    if rank == 1:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            functional.all_reduce(x, group=pair)
        return
    gathered = functional.all_gather(x, pair)
    assert [each.item() for each in gathered] == [2.0, 0.0]
    result = functional.broadcast(x, 2, pair)
    assert result.item() == 2.0
    (gathered[0] * 2 + result).sum().backward()
    assert x.grad.tolist() == ([6.0] if rank == 2 else [0.0])


def test_forms_types_groups_and_refusals(ranks):
    ranks(3)(call_every_form)


def torchs_functions() -> list[object]:
    """Returns torch's functions whose gradients are correct with gloo, and an input for each function."""
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    results: list[object] = []

    def record(call: Callable[[torch.Tensor], torch.Tensor | Tensors]) -> None:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(size * 2, 3, generator=generator).requires_grad_()
        output = call(x)
        listed = [output] if isinstance(output, torch.Tensor) else list(output)
        sum((each**2).sum() * (rank + at + 1) for at, each in enumerate(listed)).backward()
        results.extend([[each.detach().clone() for each in listed], x.grad])

    parts = partial(torch.chunk, chunks=size)
    record(lambda x: torchs.all_reduce(x))
    record(lambda x: torchs.all_reduce(x, torch_dist.ReduceOp.SUM, torch_dist.group.WORLD))
    record(lambda x: torchs.broadcast(x, 1))
    record(lambda x: torchs.all_gather(x))
    record(lambda x: torchs.reduce_scatter(torch.empty(2, 3), list(parts(x))))
    record(lambda x: torchs.all_to_all([torch.empty(2, 3) for _ in range(size)], list(parts(x))))
    record(lambda x: torchs.all_to_all_single(torch.empty_like(x), x))
    record(lambda x: torchs.all_to_all_single(torch.empty_like(x), x, [2] * size, [2] * size))
    record(lambda x: torchs.gather(x, 1))
    record(lambda x: torchs.scatter(list(parts(x)), 1))
    record(lambda x: torchs.reduce(x, 1) * (rank == 1))  # on other ranks, gloo leaves intermediate values
    return results


def autograd_functions() -> list[object]:
    """torch.distributed._functional_collectives, as DTensor and compiled programs call it."""
    import torch.distributed._functional_collectives as funcol

    rank, size, group = torch_dist.get_rank(), torch_dist.get_world_size(), torch_dist.group.WORLD
    results: list[object] = []
    rows = [2] * size
    for call in (
        lambda x: funcol.all_reduce(x, "sum", group),
        lambda x: funcol.all_gather_tensor_autograd(x, 0, group),
        lambda x: funcol.all_gather_tensor_autograd(x, 1, group),
        lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        lambda x: funcol.reduce_scatter_tensor_autograd(x.t().contiguous(), "sum", 1, group),
        lambda x: funcol.all_to_all_single_autograd(x, rows, rows, group),
        lambda x: funcol.all_to_all_single(x, None, None, group),
    ):
        x = torch.randn(size * 2, 3, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        output = call(x)
        assert isinstance(output, funcol.AsyncCollectiveTensor) or output.requires_grad
        waited = funcol.wait_tensor(output)
        results.append(waited.detach().clone())
        if waited.requires_grad:
            (waited**2 * (rank + 1)).sum().backward()
            results.append(x.grad)
    return results


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_own_agree_with_gloo(ranks, tmp_path):
    ranks(2)(agree, [torchs_functions, autograd_functions], str(tmp_path), 1e-5)


def base_forms(directory: str) -> None:
    with torch_group("paceline", directory):
        size = torch_dist.get_world_size()
        x = torch.ones(2, requires_grad=True)
        output = torchs._all_gather_base(torch.empty(2 * size), x)
        assert output.tolist() == [1.0] * 2 * size


def test_torchs_base_form_gathers(ranks, tmp_path):
    ranks(2)(base_forms, str(tmp_path))
