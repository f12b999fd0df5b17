"""Finds the tensors that a forward returned, the parameters it used, and whether a backward is running."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import torch

NO_BACKWARD = -1


def running_backward() -> int:
    """Returns the autograd engine's number of the backward that runs on this thread; NO_BACKWARD if none does."""
    task: int = torch._C._current_graph_task_id()
    return task


def in_backward() -> bool:
    """Returns whether a backward calls this, as `torch.utils.checkpoint` does to compute outputs again."""
    return running_backward() != NO_BACKWARD


def find_tensors(output: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in an output, which may be nested in lists, tuples, sets, mappings and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from find_tensors(value)
    elif isinstance(output, (list, tuple, set, frozenset)):
        for value in output:
            yield from find_tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from find_tensors(getattr(output, field.name, None))


def used_parameters(outputs: Iterable[torch.Tensor]) -> set[int]:
    """Returns the ids of the leaf tensors that the graphs of the outputs reach."""
    used: set[int] = set()
    seen: set[object] = set()
    waiting = []
    for tensor in outputs:
        if tensor.grad_fn is not None:
            waiting.append(tensor.grad_fn)
        elif tensor.requires_grad:
            used.add(id(tensor))
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            used.add(id(leaf))
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return used
