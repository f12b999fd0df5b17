"""Finds the tensors that a forward returned, the parameters it used, and whether a backward is running.

Calls functions at the end of a backward.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from paceline.comm.group.eager import eager

NO_BACKWARD = -1

_MOST_ENTRIES = 1000
_FEW = 100  # entries, which are looked at one by one
_LEAVES: frozenset[type] = frozenset((int, float, complex, bool, str, bytes, type(None)))
_Open: TypeAlias = Callable[[Any], Iterator[object]]


def running_backward() -> int:
    """Returns the autograd engine's number of the backward that runs on this thread; NO_BACKWARD if none does."""
    task: int = torch._C._current_graph_task_id()
    return task


def in_backward() -> bool:
    """Returns whether a backward calls this, as `torch.utils.checkpoint` does to compute outputs again."""
    return running_backward() != NO_BACKWARD


def is_traced() -> bool:
    """Returns whether `torch.jit.trace` records what this thread computes."""
    return torch._C._get_tracing_state() is not None


@contextmanager
def untraced() -> Iterator[None]:
    """Returns a context whose calls `torch.jit.trace` does not record."""
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)


def find_tensors(output: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in an output, which may be nested in lists, tuples, sets, mappings and dataclasses.

    It looks once into each of these, which may contain itself.
    """
    return (tensor for tensor in _walk(output, sys.maxsize) if tensor is not None)


def find_first_tensors(inputs: object) -> Iterator[torch.Tensor | None]:
    """Yields the tensors in a forward's inputs as `find_tensors` does; None at the end if there is more to look at.

    Inputs may have any number of entries that are no tensors, such as the words of a text.
    """
    return _walk(inputs, _MOST_ENTRIES)


def may_require_grad(inputs: object) -> bool:
    """Returns whether a tensor in a forward's inputs requires a gradient; True where not all could be looked at."""
    return any(tensor is None or tensor.requires_grad for tensor in find_first_tensors(inputs))


def _walk(value: object, most: int) -> Iterator[torch.Tensor | None]:
    """Yields the tensors among the first `most` entries in the order of a recursion, and None if there are more."""
    open_by_type: dict[type, _Open | None] = dict.fromkeys(_LEAVES)
    seen: dict[int, object] = {}  # which keeps them, so that no other has the same id
    waiting: list[Iterator[object]] = [iter((value,))]
    while waiting:
        for entry in waiting[-1]:
            most -= 1
            if most < 0:
                yield None
                return
            kind = type(entry)
            if kind not in open_by_type:
                open_by_type[kind] = _open_of(kind)
            open_ = open_by_type[kind]
            if open_ is None or id(entry) in seen:
                continue
            if isinstance(entry, torch.Tensor):
                yield entry
                continue
            if isinstance(entry, Sized) and _FEW < len(entry) <= most and _has_leaves_only(entry):
                continue
            seen[id(entry)] = entry
            waiting.append(open_(entry))
            break
        else:
            waiting.pop()


def _has_leaves_only(entries: object) -> bool:
    return isinstance(entries, (list, tuple, set, frozenset)) and _LEAVES.issuperset(map(type, entries))


def _open_of(kind: type) -> _Open | None:
    """Returns what gets the entries of a value of this type, None if it has none."""
    if issubclass(kind, (torch.Tensor, list, tuple, set, frozenset)):
        return iter
    if issubclass(kind, Mapping):
        return lambda value: iter(value.values())
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return lambda value: (getattr(value, name, None) for name in names)
    return None


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


class BackwardEnd:
    """Calls `callbacks`, in order, at the end of each backward in which `begin` was called."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self._task = NO_BACKWARD

    def begin(self) -> None:
        """Notes that a backward is running; hooks call this.

        Raises:
            RuntimeError: another backward has begun and not ended.
        """
        task = running_backward()
        if task == self._task:
            return
        if self._task != NO_BACKWARD:
            raise RuntimeError(
                "a backward of parameters that ZeroRedundancyOptimizer shards has begun before another one had ended. "
                "If it runs within the other one, use checkpoint(..., use_reentrant=False); if the other one has "
                "failed, call zero_grad() first"
            )
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def forget(self) -> None:
        """Forgets a backward that failed and will not end."""
        self._task = NO_BACKWARD

    @eager
    def _end(self) -> None:
        self._task = NO_BACKWARD
        for callback in self.callbacks:
            callback()
