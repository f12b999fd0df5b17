"""A program restores any state that it has saved, including empty parts and values that replace None."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from round_trips import OBJECTS, is_object, made, optimizer_of, plain, require_round_trip
from sampling import examples

import paceline as dist

NUMBERS = [1.0, -0.0, float("nan"), float("inf"), 3e-45, 7.25]

TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def emptied(tree: Any, draw: Callable[[], bool]) -> Any:
    """Returns a target for loading the tree: new objects and tensors, and None for values and some other parts."""
    if draw():
        return None
    if is_object(tree):
        return made(tree, 0)
    if isinstance(tree, dict):
        return {key: emptied(each, draw) for key, each in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None


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


def test_what_an_optimizer_keeps_for_no_parameter_comes_back(tmp_path):
    saved, other = optimizer_of(torch.optim.SGD, 0), optimizer_of(torch.optim.SGD, 0)
    first = saved.param_groups[0]["params"][0]
    saved.state[first] = {}
    saved.state["steps"] = 7  # type: ignore[index]  # as optimizers of others have it
    saved.state["history"] = [torch.ones(2), None]  # type: ignore[index]
    dist.save({"optimizer": saved}, tmp_path)
    dist.load({"optimizer": other}, tmp_path)
    assert plain(other) == plain(saved)


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


@pytest.mark.parametrize("key", ["", 3])
def test_names_that_cannot_be_told_apart_are_refused(tmp_path: Path, key: Any) -> None:
    with pytest.raises(dist.CheckpointError, match=r"the state has the key .* names must be non-empty strings"):
        dist.save({key: {"x": torch.ones(1)}, "x": torch.zeros(1)}, tmp_path)


class Holder:
    """An object whose state contains itself."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"rates": [0.1]}
        state["rates"].append(state["rates"])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def circular(*, objects: bool) -> dict[str, Any]:
    inner: dict[str, Any] = {"x": torch.ones(1) if objects else 1}
    inner["y"] = {"z": inner}
    return {"a": inner}


def itself(value: object) -> dict[str, Any]:
    state: dict[str, Any] = {"x": value}
    state["own"] = state
    return state


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (circular(objects=True), r"'a/y/z' is the dict that contains it \('a'\)"),
        (circular(objects=False), r"'a/y/z' is the dict that contains it \('a'\)"),
        (itself(torch.ones(1)), r"'own' is the dict that contains it \(the whole state\)"),
        (itself(1), r"'own/own' is the dict that contains it \('own'\)"),
        ({"holder": Holder()}, r"'holder/rates/1' is the list that contains it \('holder/rates'\)"),
    ],
)
def test_a_state_that_contains_itself_is_refused_with_its_name(tmp_path: Path, state: Any, said: str) -> None:
    with pytest.raises(dist.CheckpointError, match=said + ".*a checkpoint cannot hold a .* that contains itself"):
        dist.save(state, tmp_path)
    with pytest.raises(dist.CheckpointError, match=said), dist.CheckpointManager(tmp_path) as manager:
        manager.save(1, state, force=True)


def test_a_value_that_a_state_holds_twice_is_saved_twice(tmp_path: Path) -> None:
    twice = [1, {"x": torch.ones(2)}]
    into: dict[str, Any] = {"a": None, "b": None}
    dist.save({"a": twice, "b": {"c": twice, "d": (twice, twice)}}, tmp_path)
    dist.load(into, tmp_path)
    assert plain(into["b"]["d"][1]) == plain(into["a"]) == plain(twice)


@pytest.mark.parametrize(
    ("call", "arguments", "named", "said"),
    [
        (dist.load, ("c", {}), {}, "load got 'c' as the state and a dict as the path; it takes the state and"),
        (dist.save, (Path("c"), {}), {}, r"save got a \w+Path as the state and a dict as the path; it takes the"),
        (dist.load, ("c",), {}, r"load got no state, only 'c'; .*which loads into the objects in the state"),
        (dist.load, (), {"path": "c"}, "load got no state, only 'c'; it takes the state and then the path"),
        (dist.save, ({},), {}, r'save got no path, only a dict; .*save\(\{"model": model\}, "checkpoints"\)'),
        (dist.load, (), {}, "load got no state and no path; it takes"),
        (dist.save, ({}, 3), {}, "save got 3 as the path; it takes the state and then the path"),
        (dist.CheckpointManager, ({},), {}, "CheckpointManager got a dict as the path; pass the directory"),
        (lambda *each: dist.CheckpointManager("c").save(*each), ({}, 3), {}, "save got a dict as the step and 3"),
        (lambda path: dist.CheckpointManager("c").restore(path), ("c",), {}, "restore got 'c' as the state; the"),
    ],
)
def test_missing_and_swapped_arguments_are_told_with_their_order(call, arguments, named, said):
    with pytest.raises(TypeError, match=said):
        call(*arguments, **named)
