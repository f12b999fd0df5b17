"""Values of a checkpoint that do not fit into the state, and states that lack values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from round_trips import OBJECTS, optimizer_of, plain, require_round_trip
from torch import nn

import paceline as dist


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
