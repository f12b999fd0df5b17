"""Any state is restored by the program that saved it, including empty parts, and values loaded into None."""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch import nn

import paceline as dist

NUMBERS = [1.0, -0.0, float("nan"), float("inf"), 3e-45, 7.25]
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


class Counter:
    """An object with a state of any kind."""

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


# What makes each kind of object, with another state if it is given 0.
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
    """Returns a state from a tree in which texts represent objects."""
    if is_object(tree):
        torch.manual_seed(number)
        return OBJECTS[tree.partition(":")[2]](number)
    return {key: made(each, number) for key, each in tree.items()} if isinstance(tree, dict) else tree


def emptied(tree: Any, draw: Callable[[], bool]) -> Any:
    """Returns a target for loading the tree: new objects and tensors, and None for values and some other parts."""
    if draw():
        return None
    if is_object(tree):
        return made(tree, 0)
    if isinstance(tree, dict):
        return {key: emptied(each, draw) for key, each in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None


def plain(value: Any) -> Any:
    """Converts to comparable values that are the same for an object and for its state."""
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


tensors = st.builds(
    lambda shape, dtype: torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype),
    st.sampled_from([(), (0,), (3,), (2, 0, 3), (2, 2)]),
    st.sampled_from(TYPES),
)
keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3) | st.sampled_from(
    ["state", "a/b", "%", "x@rank0", "$set", "0", "param_groups"]
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from(NUMBERS)
    | st.binary(max_size=3)
    | st.sampled_from(["", "text", {}, [], ()])
    | tensors
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys | st.integers(0, 3), inner, max_size=3).map(lambda each: [each])
    ),
    max_leaves=6,
)
objects = st.sampled_from([f"object:{name}" for name in OBJECTS])
states = st.recursive(values | objects, lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=8)


@settings(max_examples=examples(60))
@given(st.dictionaries(keys, states, max_size=4), st.randoms(use_true_random=False))
def test_random_states_come_back_as_they_were(tree, random):
    require_round_trip(made(tree, 1), {key: emptied(each, lambda: random.random() < 0.2) for key, each in tree.items()})


@pytest.mark.parametrize(("depth", "is_alone"), [(0, True), (2, True), (2, False)])
@pytest.mark.parametrize("kind", [*OBJECTS, "{}", "[]", "()", "None", "no elements"])
def test_whatever_is_empty_is_loaded_at_every_depth(kind, is_alone, depth):
    made_of = {"{}": dict, "[]": list, "()": tuple, "None": lambda: None, "no elements": lambda: torch.empty(0, 3)}

    def state(number: int) -> dict[str, Any]:
        found: Any = OBJECTS[kind](number) if kind in OBJECTS else made_of[kind]()
        for level in range(depth):
            found = {"inner": found} if is_alone else {"inner": found, f"model{level}": nn.Linear(1, 1)}
        return {"top": found}

    require_round_trip(state(1), state(0))
    require_round_trip(state(1), {"top": None})


def test_an_optimizer_loaded_into_none_has_numbers_of_parameters(tmp_path):
    saved, other = optimizer_of(torch.optim.AdamW, 2), optimizer_of(torch.optim.AdamW, 0)
    dist.save({"optimizer": saved}, tmp_path)
    state: dict[str, Any] = {"optimizer": None}
    dist.load(state, tmp_path)
    other.load_state_dict(state["optimizer"])
    assert plain(other) == plain(saved)
    assert sorted(state["optimizer"]["state"]) == list(range(1, 12))


def test_what_an_optimizer_keeps_for_no_parameter_comes_back(tmp_path):
    saved, other = optimizer_of(torch.optim.SGD, 0), optimizer_of(torch.optim.SGD, 0)
    first = saved.param_groups[0]["params"][0]
    saved.state[first] = {}
    saved.state["steps"] = 7  # type: ignore[index]  # as optimizers of others have it
    saved.state["history"] = [torch.ones(2), None]  # type: ignore[index]
    dist.save({"optimizer": saved}, tmp_path)
    dist.load({"optimizer": other}, tmp_path)
    assert plain(other) == plain(saved)


def test_checkpoints_without_stateless_modules_are_loaded(tmp_path):
    """Earlier versions did not store entries for such modules."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    dist.save({"model": model}, tmp_path)
    dist.load({"model": other, "loss": nn.CrossEntropyLoss(), "inner": {"identity": nn.Identity()}}, tmp_path)
    assert plain(other) == plain(model)
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    third = nn.Linear(2, 2)
    dist.load({"model": third, "loss": nn.CrossEntropyLoss()}, tmp_path / "model.pt")
    assert plain(third) == plain(model)


class Mode(str, enum.Enum):
    TRAIN = "train"


class Level(enum.IntEnum):
    HIGH = 3


def test_subclasses_of_plain_values_are_saved_as_their_values(tmp_path):
    state: dict[str, Any] = {"mode": Mode.TRAIN, "level": Level.HIGH, "rate": np.float64(0.1)}
    dist.save(state, tmp_path)
    into: dict[str, Any] = dict.fromkeys(state)
    dist.load(into, tmp_path)
    assert plain(into) == plain({"mode": "train", "level": 3, "rate": 0.1})


@pytest.mark.parametrize(
    ("saved", "into", "said"),
    [
        (
            3,
            torch.zeros(()),
            r"'x' is a tensor here, and something else in .*step_0000000001; load it into an object of the saved type",
        ),
        (nn.Linear(1, 1), torch.zeros(1), r"'x' is a tensor here, and something else in"),
        (3, optimizer_of(torch.optim.SGD, 0), r"'x' is an optimizer here, and something else in .*; load it into"),
        (nn.Linear(1, 1), optimizer_of(torch.optim.SGD, 0), r"'x' is an optimizer here, and something else in"),
        (3, nn.ReLU(), r"'x' is a module here, and a plain value in .*; load it into an object of the saved type"),
        (nn.Linear(1, 1), nn.ReLU(), r"also has \['bias', 'weight'\]"),
        (nn.ReLU(), nn.Linear(1, 1), r"it lacks \['bias', 'weight'\]"),
        ({}, {"a": torch.zeros(1)}, r"has no 'x/a'; it has 'x'"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, saved: Any, into: Any, said: str) -> None:
    dist.save({"x": saved}, tmp_path, step=1)
    with pytest.raises(dist.CheckpointError, match=said):
        dist.load({"x": into}, tmp_path)


@pytest.mark.parametrize("into", [nn.Linear(1, 1), optimizer_of(torch.optim.SGD, 0), {"a": torch.zeros(1)}])
def test_what_does_not_fit_in_a_foreign_file_is_named(tmp_path: Path, into: Any) -> None:
    torch.save({"x": None}, tmp_path / "file.pt")
    with pytest.raises(dist.CheckpointError, match=rf"'x' is a {type(into).__name__} here, and a NoneType in"):
        dist.load({"x": into}, tmp_path / "file.pt")


@pytest.mark.parametrize("key", ["", 3])
def test_names_that_cannot_be_told_apart_are_refused(tmp_path: Path, key: Any) -> None:
    with pytest.raises(dist.CheckpointError, match=r"the state has the key .* names must be non-empty strings"):
        dist.save({key: {"x": torch.ones(1)}, "x": torch.zeros(1)}, tmp_path)
