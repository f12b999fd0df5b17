"""Digests of states: equal for equal values, regardless of containers and order, and different otherwise."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.elastic.training_state import PendingGradients, digest_of_state, on_host


class Mode(str, enum.Enum):
    TRAIN = "train"


def strided() -> torch.Tensor:
    return torch.arange(12.0).reshape(4, 3).t()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1}, Counter(a=1)),
        ({1: "a", "1": "b"}, {"1": "b", 1: "a"}),
        ((1, 2), [1, 2]),
        (torch.Size([1, 2]), (1, 2)),
        ({1, 2}, frozenset([2, 1])),
        (strided(), strided().contiguous()),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (np.float64(0.1), 0.1),
        (np.int64(3), 3),
        (np.arange(3.0), torch.arange(3.0, dtype=torch.float64)),
        (Mode.TRAIN, "train"),
        (enum.IntEnum("Level", "LOW")(1), 1),
        (float("nan"), -float("nan")),
    ],
)
def test_equal_values_have_equal_digests(one, other):
    assert digest_of_state(one) == digest_of_state(other)
    assert digest_of_state([{"x": one}]) == digest_of_state([{"x": other}])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ([1, 2], [2, 1]),
        ([[1], 2], [1, [2]]),
        (["ab", "c"], ["a", "bc"]),
        ([], {}),
        ([], [[]]),
        ({"a": {}}, {}),
        ({1: "a"}, {"1": "a"}),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        ("a", b"a"),
        (None, "None"),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.empty(0, 2), torch.empty(0, 3)),
        (torch.tensor(1.0), 1.0),
        (strided(), strided().contiguous().view(4, 3)),
        ([torch.ones(1), torch.ones(2)], [torch.ones(2), torch.ones(1)]),
        (torch.float32, torch.float64),
    ],
)
def test_different_values_have_different_digests(one, other):
    assert digest_of_state(one) != digest_of_state(other)
    assert digest_of_state([{"x": one}]) != digest_of_state([{"x": other}])


leaves = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
states = st.recursive(leaves, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3))


@given(states, states, st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter_and_all_else_does(one, other, random):
    assert digest_of_state(shuffled(one, random)) == digest_of_state(one)
    if typed(one) != typed(other):
        assert digest_of_state(one) != digest_of_state(other)


def shuffled(value: Any, random: Any) -> Any:
    if isinstance(value, dict):
        keys = random.sample(list(value), len(value))
        return {key: shuffled(value[key], random) for key in keys}
    return [shuffled(each, random) for each in value] if isinstance(value, list) else value


def typed(value: Any) -> Any:
    """Distinguishes 1 from True, and 0.0 from -0.0."""
    if isinstance(value, dict):
        return {key: typed(each) for key, each in value.items()}
    return [*map(typed, value)] if isinstance(value, list) else (type(value), repr(value))


def test_the_digest_is_what_is_described():
    import hashlib

    def joined(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(len(each).to_bytes(8, "little") + each for each in parts)).digest()

    ones = joined(b"tensor", b"float32[2, 1]", b"\x00\x00\x80\x3f" * 2)
    entries = sorted(
        [(joined(b"str", b"x"), ones), (joined(b"int", b"7"), joined(b"sequence", joined(b"bool", b"True")))]
    )
    expected = joined(b"mapping", *(part for entry in entries for part in entry)).hex()
    assert digest_of_state({7: (True,), "x": torch.ones(2, 1)}) == expected


def test_memory_without_copy_on_write_is_copied_for_a_child(monkeypatch):
    plain, shared, pinned = torch.ones(2), torch.ones(2).share_memory_(), torch.ones(2)
    sparse = torch.ones(2).to_sparse()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is pinned)
    captured = on_host({"plain": plain, "others": [shared, pinned], "sparse": sparse})
    for tensor in (plain, shared, pinned):
        tensor.zero_()
    assert captured["plain"] is plain and captured["sparse"] is sparse
    assert [tensor.tolist() for tensor in captured["others"]] == [[1, 1], [1, 1]]


def test_pending_gradients_of_compiled_modules_have_plain_names():
    module, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    gradients = PendingGradients(torch.compile(module)).state_dict()
    assert gradients.keys() == {"weight", "bias"}
    for state in (gradients, {f"_orig_mod.{name}": gradient for name, gradient in gradients.items()}):
        for into in (other, torch.compile(other)):
            other.zero_grad()
            PendingGradients(into).load_state_dict(state)
            assert torch.equal(other.weight.grad, module.weight.grad)
