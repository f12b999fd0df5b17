"""Gathers the optimizer's state on one rank, as the unsharded optimizer would have it.

Nothing is pickled: numbers are sent as JSON, and tensors as their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from paceline.group.process_group import ProcessGroup

State = dict[int, dict[str, object]]

_PLAIN = (bool, int, float, str, type(None))


def gather_state(mine: Mapping[int, Mapping[str, object]], group: ProcessGroup, to: int) -> State | None:
    """Returns the states of all ranks' shards, by number, on group rank `to`, and None on the others.

    Raises:
        TypeError: a state has a value other than a tensor, a number, a string or None; raised on every rank.
    """
    problem = _unsendable(mine)
    described = [] if problem else [[index, name, _describe(value)] for index, name, value in _flat(mine)]
    everyone = [json.loads(data) for data in group.all_gather_bytes(json.dumps([problem, described]).encode())]
    for rank, (told, _) in zip(group.ranks, everyone, strict=True):
        if told:
            raise TypeError(f"consolidate_state_dict: rank {rank} has {told}")
    if group.rank() != to:
        tensors = [value for _, _, value in _flat(mine) if isinstance(value, torch.Tensor)]
        if tensors:
            group.send([_bytes(tensor.detach().contiguous()) for tensor in tensors], to, async_op=False)
        return None
    gathered: State = {}
    for rank, (_, entries) in enumerate(everyone):
        received: list[torch.Tensor] = []
        for index, name, (kind, *what) in entries:
            value = what[0]
            if kind == "tensor":
                if rank == to:
                    kept = mine[index][name]
                    assert isinstance(kept, torch.Tensor)
                    value = kept.detach().clone()
                else:
                    value = torch.empty(what[1], dtype=getattr(torch, what[0]))
                    received.append(_bytes(value))
            gathered.setdefault(index, {})[name] = value
        if received:
            group.recv(received, rank, async_op=False)
    return dict(sorted(gathered.items()))


def _flat(state: Mapping[int, Mapping[str, object]]) -> list[tuple[int, str, object]]:
    return [(index, name, value) for index, values in state.items() for name, value in values.items()]


def _unsendable(state: Mapping[int, Mapping[str, object]]) -> str | None:
    for _, name, value in _flat(state):
        if not isinstance(value, (torch.Tensor, *_PLAIN)):
            return (
                f"a state {name!r} of type {type(value).__name__}; only tensors, numbers, strings and None can be "
                "sent. Use an optimizer whose state consists of these"
            )
    return None


def _describe(value: object) -> list[object]:
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    return ["plain", value]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
