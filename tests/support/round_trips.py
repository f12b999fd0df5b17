"""States that contain every kind of value, and a check that checkpoints restore them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import paceline as dist


class Counter:
    """An object that may have any state."""

    def __init__(self, state: object = None) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


def optimizer_of(kind: type[torch.optim.Optimizer], steps: int) -> torch.optim.Optimizer:
    weights = [nn.Parameter(torch.full((2, 3), float(each))) for each in range(12)]
    made = kind(weights, lr=0.5)  # type: ignore[call-arg]  # what all optimizers take
    for _ in range(steps):
        for weight in weights[1:]:
            weight.grad = torch.ones(2, 3)
        made.step()
    return made


# A factory for each kind of object. With the argument 0, some factories return an object with a different state.
OBJECTS: dict[str, Callable[[int], Any]] = {
    "loss": lambda _: nn.CrossEntropyLoss(),
    "identity": lambda _: nn.Identity(),
    "modules": lambda _: nn.ModuleDict({"r": nn.ReLU(), "l": nn.ModuleList()}),
    "linear": lambda _: nn.Linear(2, 1, bias=False),
    "norm": lambda _: nn.BatchNorm1d(3),
    "scaler": lambda _: torch.amp.GradScaler("cpu", enabled=False),
    "sgd": lambda _: optimizer_of(torch.optim.SGD, 0),
    "adam": lambda number: optimizer_of(torch.optim.AdamW, 2 if number else 0),
    "nothing": lambda number: Counter({} if number else 1),
    "none": lambda number: Counter(None if number else 1),
    "list": lambda number: Counter([torch.ones(2), {}, ()] if number else 1),
}


def is_object(value: object) -> bool:
    return isinstance(value, str) and value.startswith("object:")


def made(tree: Any, number: int) -> Any:
    """Returns a state from a tree in which strings represent objects."""
    if is_object(tree):
        torch.manual_seed(number)
        return OBJECTS[tree.partition(":")[2]](number)
    return {key: made(each, number) for key, each in tree.items()} if isinstance(tree, dict) else tree


def plain(value: Any) -> Any:
    """Converts a value to a comparable form, which is the same for an object and for its state."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1)
        return "tensor", str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist()
    if isinstance(value, nn.Module) or hasattr(value, "load_state_dict"):
        value = value.state_dict()
    if isinstance(value, Mapping):
        return {(type(key), key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [plain(each) for each in value]
    return type(value), repr(value)


def require_round_trip(saved: dict[str, Any], into: dict[str, Any]) -> None:
    expected = plain(saved)
    with tempfile.TemporaryDirectory() as root:
        dist.save(saved, root, step=1)
        assert dist.load(into, root) == 1
    assert plain(into) == expected
