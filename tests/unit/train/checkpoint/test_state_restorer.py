"""Values in a checkpoint that do not fit into the state, and states that lack values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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


class Tower(nn.Module):
    """A model with a buffer, extra state, and an attribute with a name that torch.compile uses."""

    def __init__(self, *, inner: bool = False) -> None:
        super().__init__()
        first = nn.Linear(2, 3)
        self.body = nn.Sequential(torch.compile(first) if inner else first, nn.BatchNorm1d(3))
        self._orig_mod = nn.Linear(3, 1)
        self.steps = 0
        if inner:
            self.body = torch.compile(self.body)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def towers() -> dict[str, nn.Module]:
    return {
        "plain": Tower(),
        "compiled": torch.compile(Tower()),
        "compiled inside": Tower(inner=True),
        "compiled twice": torch.compile(Tower(inner=True)),
        "compiled wrapper": torch.compile(nn.DataParallel(Tower())),
        "wrapper of compiled": nn.DataParallel(torch.compile(Tower())),
    }


def trained(model: nn.Module) -> nn.Module:
    next(module for module in model.modules() if isinstance(module, Tower)).steps = 7
    return model


def values_of(tower: nn.Module) -> list[object]:
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in tower.state_dict().values()]


@pytest.mark.parametrize("kind", ["plain", "compiled", "compiled inside", "compiled wrapper"])
def test_compiled_modules_have_plain_names_in_checkpoints(tmp_path, kind):
    saved = trained(towers()[kind])
    dist.save({"model": saved}, tmp_path / "ours")
    dist.load(state := {"model": None}, tmp_path / "ours")
    assert state["model"].keys() == Tower().state_dict().keys()
    torch.save({"model": saved.state_dict()}, tmp_path / "theirs.pt")
    for path in ("ours", "theirs.pt"):
        for other in towers().values():
            dist.load({"model": other}, tmp_path / path)
            assert values_of(other) == values_of(saved)


def test_checkpoints_with_the_names_of_the_compiler_are_loaded(tmp_path, monkeypatch):
    """Earlier versions saved these names."""
    saved = trained(towers()["compiled twice"])
    monkeypatch.setattr("paceline.train.checkpoint.captured_state.uncompiled_key", lambda module, key: key)
    dist.save({"model": saved}, tmp_path)
    monkeypatch.undo()
    for other in towers().values():
        dist.load({"model": other}, tmp_path)
        assert values_of(other) == values_of(saved)
    with pytest.raises(dist.CheckpointError, match="belongs to another model: it lacks"):
        dist.load({"model": torch.compile(nn.Linear(2, 2))}, tmp_path)


def test_conjugate_and_negative_views_keep_the_signs_of_values(tmp_path):
    dist.save({"complex": torch.tensor([1 + 2j]), "real": torch.ones(2)}, tmp_path, step=1)
    state = {
        "complex": torch.zeros(1, dtype=torch.complex64).conj(),
        "real": torch._neg_view(torch.zeros(2)),
    }
    dist.load(state, tmp_path)
    assert state["complex"].tolist() == [1 + 2j]
    assert state["real"].tolist() == [1.0, 1.0]


UNLOADABLE = {
    "expanded": (lambda _: torch.zeros(1, 3).expand(2, 3), r"a view of shape \[2, 3\] and strides \[0, 1\], of which"),
    "one element": (
        lambda _: torch.zeros(()).expand(2, 3),
        r"elements share memory, .*; pass tensor\.clone\(\)",
    ),
    "overlapping": (lambda _: torch.zeros(4).as_strided((2, 3), (1, 1)), "of which several elements share memory"),
    "meta": (lambda _: torch.zeros(2, 3, device="meta"), r"on the meta device .* module\.to_empty\(device='cpu'\)"),
    "sparse": (lambda _: torch.zeros(2, 3).to_sparse(), r"a torch\.sparse_coo tensor; load into a dense tensor"),
    "compressed": (lambda _: torch.zeros(2, 3).to_sparse_csr(), r"a torch\.sparse_csr tensor; load into a dense"),
    "mapped": (
        lambda path: torch.from_numpy(np.memmap(path, np.float32, "r", shape=(2, 3))),
        r"in memory that this process cannot write to, .*numpy\.memmap with mode 'r'; pass tensor\.clone\(\)",
    ),
}


def files_with(tmp_path: Path, saved: torch.Tensor) -> list[Path]:
    dist.save({"x": saved}, tmp_path / "ours")
    torch.save({"x": saved}, tmp_path / "theirs.pt")
    return [tmp_path / "ours", tmp_path / "theirs.pt"]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("kind", UNLOADABLE)
def test_a_tensor_that_cannot_be_written_to_is_named(tmp_path: Path, kind: str) -> None:
    make, said = UNLOADABLE[kind]
    (tmp_path / "zeros").write_bytes(bytes(24))
    for path in files_with(tmp_path, torch.arange(6.0).view(2, 3)):
        with pytest.raises(dist.CheckpointError, match=f"'x' cannot be loaded: here, it is {'.*' + said}"):
            dist.load({"x": make(tmp_path / "zeros")}, path)


def test_views_and_tensors_of_any_layout_are_loaded_in_place(tmp_path: Path) -> None:
    saved = torch.arange(6.0).view(2, 3)
    for path in files_with(tmp_path, saved):
        for target in (
            torch.zeros(2, 3, requires_grad=True),
            nn.Parameter(torch.zeros(3, 2)).T,
            torch.zeros(2, 6, requires_grad=True)[:, ::2],
            torch.zeros(9).as_strided((2, 3), (3, 2)),
            torch.from_numpy(np.zeros((2, 3), np.float64)),
            torch.zeros(2, 3, dtype=torch.complex64).conj(),
        ):
            state = {"x": target}
            dist.load(state, path)
            assert state["x"] is target and target.tolist() == saved.tolist()
        quantized = torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.quint8)
        dist.load({"x": quantized}, path)
        assert quantized.dequantize().equal(saved)


def test_tensors_made_in_inference_mode_are_loaded(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 2), torch.arange(6.0).view(2, 3)
    dist.save({"model": model, "x": x}, tmp_path / "ours")
    torch.save({"model": model.state_dict(), "x": x}, tmp_path / "theirs.pt")
    for path in ("ours", "theirs.pt"):
        for dtype in (torch.float32, torch.float64):
            with torch.inference_mode():
                state = {"model": nn.Linear(3, 2, dtype=dtype), "x": torch.zeros(2, 3, dtype=dtype)}
            dist.load(state, tmp_path / path)
            assert state["x"].tolist() == x.tolist()
            assert state["model"].weight.tolist() == model.weight.tolist()


def test_a_module_on_the_meta_device_is_named(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    dist.save({"model": model}, tmp_path / "ours")
    torch.save({"model": model.state_dict()}, tmp_path / "theirs.pt")
    for path in ("ours", "theirs.pt"):
        with pytest.raises(dist.CheckpointError, match=r"'model/weight' cannot be loaded: .* on the meta device"):
            dist.load({"model": nn.Linear(3, 2, device="meta")}, tmp_path / path)


def test_a_tensor_of_another_shape_in_a_foreign_file_is_named(tmp_path: Path) -> None:
    path = files_with(tmp_path, torch.zeros(2, 3))[1]
    with pytest.raises(
        dist.CheckpointError, match=r"'x' has the shape \[2, 3\] in .*, but \[6\] here; load it into None"
    ):
        dist.load({"x": torch.zeros(6)}, path)
    torch.save({"x": 3}, path)
    with pytest.raises(dist.CheckpointError, match="'x' is a tensor here, and a int in .*; load it into None"):
        dist.load({"x": torch.zeros(6)}, path)
