"""The main collectives with every kind of tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_calls.case import CASES, Case, tensor

SHAPES = {
    "0-dim": (),
    "empty": (0,),
    "no rows": (0, 3),
    "matrix": (3, 4),
}
KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    **{name: lambda r, shape=shape: tensor(r, *shape) for name, shape in SHAPES.items()},
    "transposed": lambda r: tensor(r, 3, 4).t(),
    "requires_grad": lambda r: tensor(r, 4).requires_grad_(),
    "computed": lambda r: tensor(r, 4).requires_grad_() * 2,
    "parameter": lambda r: torch.nn.Parameter(tensor(r, 4)),
    "complex": lambda r: torch.complex(tensor(r, 4), tensor(r + 9, 4)),
    "int64": lambda r: tensor(r, 4, dtype=torch.int64),
    "uint8": lambda r: tensor(r, 4, dtype=torch.uint8),
    "float16": lambda r: tensor(r, 4, dtype=torch.float16),
    "bool": lambda r: tensor(r, 4) > 50,
}


def forms() -> Iterator[tuple[str, Case]]:
    for name, make in KINDS.items():

        def all_reduce(d: Any, r: int, n: int, make: Any = make) -> object:
            t = make(r).detach() if "bool" not in str(make(r).dtype) else make(r).to(torch.uint8)
            assert d.all_reduce(t) is None
            return t

        def broadcast(d: Any, r: int, n: int, make: Any = make) -> object:
            with torch.no_grad():
                d.broadcast(t := make(r), 1)
            return t.detach()

        def all_gather(d: Any, r: int, n: int, make: Any = make) -> object:
            outputs = [torch.empty_like(make(r).detach(), memory_format=torch.contiguous_format) for _ in range(n)]
            d.all_gather(outputs, make(r).detach())
            return outputs

        def gather_and_scatter(d: Any, r: int, n: int, make: Any = make) -> object:
            t = make(r).detach().contiguous()
            lists = [torch.empty_like(t) for _ in range(n)] if r == 0 else []
            d.gather(t, lists, dst=0)
            d.scatter(t, [each.clone() for each in lists][::-1], src=0)
            return [t, *lists]

        def send(d: Any, r: int, n: int, make: Any = make) -> object:
            t = make(r).detach().contiguous()
            d.send(t, 1) if r == 0 else d.recv(t, 0)
            return t

        for function in (all_reduce, broadcast, all_gather, gather_and_scatter, send):
            yield f"{function.__name__}: {name}", function


CASES.update(forms())
