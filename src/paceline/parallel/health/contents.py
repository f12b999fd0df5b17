"""What a replica consists of, as digests by name: parameters, buffers, the state of optimizers, random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.parallel.digests import digest_of, digest_of_text
from paceline.parallel.health.verdict import Digests

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Part:
    """A part of the state: the digest of each of its values, by name and in an order that is the same on every rank."""

    values: Mapping[str, int]

    def digests(self) -> Digests:
        """Returns digests of all names, and of all values."""
        if not self.values:
            return Digests(0, 0)
        return Digests(digest_of_text("\n".join(self.values)), digest_of_text(" ".join(map(str, self.values.values()))))


def tensors_part(named: Mapping[str, torch.Tensor]) -> Part:
    """Returns the digests of tensors; those without memory of their own, such as sparse ones, are left out."""
    return Part({repr(name): digest_of([each]) for name, each in named.items() if _has_memory(each)})


def optimizers_part(optimizers: Iterable[torch.optim.Optimizer], params: Mapping[str, nn.Parameter]) -> Part:
    """Returns the digests of the settings of the optimizers of these parameters, and of their states for them.

    With ZeRO, each rank has an optimizer or states of some parameters only, and so names of its own. Ranks with
    different names are not compared.
    """
    names = {id(param): name for name, param in params.items()}
    places = {key: at for at, key in enumerate(names)}
    own: list[tuple[list[int], str, torch.optim.Optimizer]] = []
    for optimizer in optimizers:
        ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
        if any(each in names for each in ids):
            own.append((sorted(places[each] for each in ids if each in names), type(optimizer).__name__, optimizer))
    values: dict[str, int] = {}
    for number, (_, kind, optimizer) in enumerate(sorted(own, key=lambda each: each[:2])):
        values |= _optimizer_values(kind if number == 0 else f"{kind} {number + 1}", optimizer, names)
    return Part(values)


def random_part() -> Part:
    """Returns the digests of the states of torch's and Python's random numbers on the CPU."""
    return Part(
        {
            "torch's random state": digest_of([torch.get_rng_state()]),
            "Python's random state": digest_of_text(repr(random.getstate())),
        }
    )


def _optimizer_values(kind: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, int]:
    values: dict[str, int] = {}
    for at, group in enumerate(optimizer.param_groups):
        where = f"of {kind}'s group {at}" if len(optimizer.param_groups) > 1 else f"of {kind}"
        for key in sorted(key for key in group if key not in ("params", "param_names")):
            _add(values, f"{key!r} {where}", group[key])
        for param in group["params"]:
            state = optimizer.state.get(param, {}) if id(param) in names else {}
            for key in sorted(map(str, state)):
                _add(values, f"{key!r} of {kind} for {names[id(param)]!r}", state.get(key))
    return values


def _add(values: dict[str, int], name: str, value: object) -> None:
    """Adds the digest of a tensor or a plain value; others may have a representation that says nothing."""
    if isinstance(value, torch.Tensor):
        if _has_memory(value):
            values[name] = digest_of([value])
    elif isinstance(value, _PLAIN) or (isinstance(value, Sequence) and all(isinstance(each, _PLAIN) for each in value)):
        values[name] = digest_of_text(repr(value))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's numbers are in its own memory, and not in that of tensors which it wraps."""
    return tensor.layout is torch.strided and not tensor.is_meta and not hasattr(tensor, "__tensor_flatten__")
