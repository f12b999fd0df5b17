"""Finds the tensors in nested outputs, the parameters that outputs depend on, and the running backward pass."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from paceline.comm.group.eager import eager

NO_BACKWARD = -1

_MOST_ENTRIES = 1000
_FEW = 100  # larger containers are skipped at once if all their entries are plain values
_LEAVES: frozenset[type] = frozenset((int, float, complex, bool, str, bytes, type(None)))
_Open: TypeAlias = Callable[[Any], Iterator[object]]


def running_backward() -> int:
    """Returns autograd's task id of the backward pass running on this thread, or NO_BACKWARD if there is none."""
    task: int = torch._C._current_graph_task_id()
    return task


def in_backward() -> bool:
    """Returns True if a backward pass is running on this thread, as when checkpointed activations are recomputed."""
    return running_backward() != NO_BACKWARD


def is_traced() -> bool:
    """Returns True if `torch.jit.trace` is recording operations on this thread."""
    return torch._C._get_tracing_state() is not None


@contextmanager
def untraced() -> Iterator[None]:
    """Returns a context in which `torch.jit.trace` does not record operations."""
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)


def find_tensors(output: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in an output; lists, tuples, sets, mappings and dataclasses are searched recursively.

    Each container is searched once, so self-referential containers are supported.
    """
    return (tensor for tensor in _walk(output, sys.maxsize) if tensor is not None)


def find_first_tensors(inputs: object) -> Iterator[torch.Tensor | None]:
    """Yields the tensors among the first entries of a forward pass's inputs, then None if further entries remain.

    The limit bounds the search time for inputs with many non-tensor entries, such as lists of words.
    """
    return _walk(inputs, _MOST_ENTRIES)


def may_require_grad(inputs: object) -> bool:
    """Returns True if an input to a forward pass requires a gradient, or if there are too many entries to search."""
    return any(tensor is None or tensor.requires_grad for tensor in find_first_tensors(inputs))


def _walk(value: object, most: int) -> Iterator[torch.Tensor | None]:
    """Yields the tensors among the first `most` entries, in depth-first order, then None if further entries remain."""
    open_by_type: dict[type, _Open | None] = dict.fromkeys(_LEAVES)
    seen: dict[int, object] = {}  # by id; the references keep ids from being reused
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
    """Returns a function that iterates over the entries of an instance of `kind`, or None if `kind` has no entries."""
    if issubclass(kind, (torch.Tensor, list, tuple, set, frozenset)):
        return iter
    if issubclass(kind, Mapping):
        return lambda value: iter(value.values())
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return lambda value: (getattr(value, name, None) for name in names)
    return None


def used_parameters(outputs: Iterable[torch.Tensor]) -> set[int]:
    """Returns the ids of the leaf tensors that are reachable through the autograd graphs of the outputs."""
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
    """Runs `callbacks` in order at the end of each backward pass in which `begin` was called."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self._task = NO_BACKWARD
        self._lock = threading.Lock()  # autograd calls hooks on one thread per device

    def begin(self) -> None:
        """Registers the running backward pass; called from autograd hooks."""
        task = running_backward()
        with self._lock:
            if task == self._task:
                return
            if self._task != NO_BACKWARD:
                raise RuntimeError(
                    "a backward of parameters that ZeroRedundancyOptimizer shards has started before another one had "
                    "finished. If it runs within the other one, use checkpoint(..., use_reentrant=False); if the other "
                    "one has failed, call zero_grad() first"
                )
            self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def forget(self) -> None:
        """Discards a registered backward pass that failed and will therefore never finish."""
        self._task = NO_BACKWARD

    @eager
    def _end(self) -> None:
        self._task = NO_BACKWARD
        for callback in self.callbacks:
            callback()
