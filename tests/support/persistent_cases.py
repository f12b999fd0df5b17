"""Compares the plain and persistent forms of every collective on identical random tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from values import FLOATS, INTEGERS, supported

import paceline as dist
from paceline import ReduceOp

ROUNDS = 3  # number of runs of each persistent call


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    op: ReduceOp
    count: int
    root: int  # modulo the number of ranks
    seed: int


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from([torch.bool, *FLOATS, *INTEGERS]))
    op = draw(st.sampled_from(supported(dtype)))
    # Sizes for inline data, one slot, slices, and several parts.
    count = draw(st.one_of(st.integers(0, 20), st.integers(21, 9000), st.integers(9001, 80_000)))
    return Case(dtype, op, count, draw(st.integers(0, 7)), draw(st.integers(0, 1 << 20)))


def drawn(count: int) -> list[Case]:
    """Returns random cases. They are drawn in the pytest process, so that all ranks run the same ones."""
    found: list[Case] = []

    @settings(max_examples=examples(count), database=None)
    @given(_cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


Form = Callable[[str], Callable[..., Callable[[], object]]]


def _plain(name: str) -> Callable[..., Callable[[], object]]:
    return partial(partial, getattr(dist, name))


def _persistent(name: str) -> Callable[..., dist.PersistentCall]:
    return getattr(dist, f"{name}_init")


class Tensors:
    """Creates the tensors for a form, and assigns new values, which are the same for both forms."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case = case
        self._rank = rank
        self.made: list[torch.Tensor] = []

    def __call__(self, *shape: int) -> torch.Tensor:
        self.made.append(torch.zeros(shape, dtype=self._case.dtype))
        return self.made[-1]

    def strided(self, count: int) -> torch.Tensor:
        return self(count, 2)[:, 1]

    def renew(self, number: int) -> None:
        generator = torch.Generator().manual_seed(self._case.seed + 1000 * number + self._rank)
        for tensor in self.made:
            tensor.copy_(torch.randint(0, 5, tensor.shape, generator=generator))


def _calls(of: Form, new: Tensors, case: Case, group: dist.ProcessGroup) -> Iterator[Callable[[], object]]:
    count, op = case.count, case.op
    rank, size = group.rank(), group.size()
    root = case.root % size
    at_root = rank == root
    each = range(size)
    yield of("all_reduce")(new(count), op, group=group)
    yield of("all_reduce")([new(3), new(count), new(2, 2)], op, group=group)
    yield of("all_reduce")(new.strided(count), op, group=group)
    yield of("broadcast")(new(count), group_src=root, group=group)
    yield of("reduce")(new(count), group_dst=root, op=op, group=group)
    yield of("all_gather")([new(count) for _ in each], new(count), group=group)
    yield of("all_gather_into_tensor")(new(size * count), new(count), group=group)
    yield of("reduce_scatter")(new(count), [new(count) for _ in each], op, group=group)
    yield of("reduce_scatter_tensor")(new(count), new(size, count), op, group=group)
    yield of("gather")(new(count), [new(count) for _ in each] if at_root else None, group_dst=root, group=group)
    yield of("scatter")(new(count), [new(count) for _ in each] if at_root else None, group_src=root, group=group)
    to = [new((rank + r) % 3 * count) for r in each]
    yield of("all_to_all")([new((rank + r) % 3 * count) for r in each], to, group=group)
    yield of("all_to_all_single")(new(size * count, 1), new(size * count, 1), group=group)
    yield of("barrier")(group=group)


def agree(cases: list[Case], group: dist.ProcessGroup) -> int:
    """Compares the forms bitwise; returns the number of calls that were compared."""
    compared = 0
    for case in cases:
        ours, wanted = Tensors(case, group.rank()), Tensors(case, group.rank())
        calls = list(_calls(_persistent, ours, case, group))
        plain = list(_calls(_plain, wanted, case, group))
        for number in range(ROUNDS):
            ours.renew(number)
            wanted.renew(number)
            for call, make in zip(calls, plain, strict=True):
                make()
                if number == 1:
                    call.start()
                    call.wait()
                else:
                    call()
                compared += 1
            for mine, other in zip(ours.made, wanted.made, strict=True):
                assert torch.equal(mine, other), (case, number, mine.shape)
    return compared
