"""A state's values, stored as JSON in a manifest."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE
from paceline.train.checkpoint.format.values import DType, TensorRef, decode, encode, tensors_in

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.builds(TensorRef, st.text())
    | st.builds(DType, st.sampled_from(sorted(ITEMSIZE))),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.frozensets(st.integers() | st.text())
    ),
    max_leaves=15,
)


def shown(value):
    """Returns a representation that is equal for equal values, including NaN, regardless of the order in sets."""
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [shown(item) for item in value]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


@given(plain)
def test_values_come_back_from_json_as_they_were(value):
    returned = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert shown(returned) == shown(value)


def test_values_keep_the_types_that_json_does_not_have():
    value = {1: (2, [3.5, math.inf]), "$x": b"\0", "n": None, "big": 2**80, "set": {1, 2}, "zero": -0.0}
    returned = decode(json.loads(json.dumps(encode(value))))
    assert returned == value and type(returned[1]) is tuple and math.copysign(1, returned["zero"]) == -1


def test_a_value_that_cannot_be_held_is_named_by_its_place():
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is a builtins.object, which a checkpoint cannot contain"):
        encode({"a": [1, object()]}, "state")


def test_a_tag_of_a_newer_version_is_refused():
    with pytest.raises(ValueError, match=r"the tag '\$decimal' is not known; the known tags are \$bytes"):
        decode({"$decimal": "1.5"})


def test_tensors_in_a_tree_of_values_are_found():
    assert tensors_in(encode({"a": [TensorRef("x")], 3: (TensorRef("y"), 1)})) == {"x", "y"}
