"""Encoding and decoding of objects: equality, rejected objects, and safe decoding of arbitrary bytes."""

from __future__ import annotations

import datetime
import enum
import math
import random
import struct
import tracemalloc
import uuid
from collections import Counter, OrderedDict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.comm.engine.channel import DTYPE_CODES
from paceline.comm.group.collectives.object_codec import (
    MAX_DEPTH,
    BodyFormat,
    MalformedPayload,
    PickleRefused,
    decode,
    encode,
)


def there_and_back(value: object) -> object:
    encoded = encode(value, "obj")
    return decode(bytes(encoded.body), [buffer.clone() for buffer in encoded.buffers])


def same(a: object, b: object) -> bool:
    """Returns True if values and all nested types are equal; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        a, b = (t.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (a, b))
        return alike and torch.equal(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, Decimal):
        return str(a) == str(b)
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


zones = st.none() | st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(datetime.timezone)
hashable = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.dates()
    | st.times(timezones=zones)
    | st.datetimes(timezones=zones)
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.from_regex(r"[a-z]{1,5}(/[a-z]{1,5})?", fullmatch=True).map(Path)
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3))
)
leaves = (
    hashable
    | st.floats()
    | st.complex_numbers()
    | st.decimals()
    | st.binary().map(bytearray)
    | st.just(torch.float32)
    | st.just(torch.device("cuda", 1))
)


def containers(children):
    """Strategies for containers of `children`. A NaN is not equal to its copy, so it is not used as a key."""
    keys = hashable | st.tuples(hashable, hashable) | st.frozensets(hashable, max_size=3)
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.lists(children, max_size=4).map(lambda items: deque(items, 9))
        | st.dictionaries(st.text(max_size=4), children, max_size=4)
        | st.dictionaries(keys, children, max_size=4)
        | st.dictionaries(keys, children, max_size=4).map(OrderedDict)
        | st.sets(hashable, max_size=4)
        | st.frozensets(hashable, max_size=4)
        | st.dictionaries(hashable, st.integers(), max_size=4).map(Counter)
    )


@given(st.recursive(leaves, containers, max_leaves=20))
@settings(max_examples=examples(300), deadline=None)
def test_what_is_sent_comes_back_equal_and_of_the_same_type(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (3, 4)])
def test_tensors_of_every_type_and_shape_come_back(dtype, shape):
    tensor = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
    assert same(there_and_back([tensor, {"t": tensor}]), [tensor, {"t": tensor}])


def test_tensors_come_back_with_memory_of_their_own():
    kinds = [
        torch.randn(3, 4).t(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, requires_grad=True),
        torch.nn.Parameter(torch.randn(2)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
        torch.randn(1).expand(5),
        torch.Size([2, 3]),
    ]
    assert same(there_and_back(kinds), kinds)
    whole = torch.zeros(1000)
    assert there_and_back(whole[:2]).untyped_storage().nbytes() == 8


def test_a_contiguous_tensor_is_sent_from_where_it_is():
    tensor, array = torch.zeros(4), np.zeros(4)
    encoded = encode([tensor, array], "obj")
    assert [buffer.data_ptr() for buffer in encoded.buffers] == [tensor.data_ptr(), array.ctypes.data]


def test_a_state_dict_comes_back_with_its_versions():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = there_and_back(model.state_dict())
    assert type(state) is OrderedDict
    assert state._metadata == model.state_dict()._metadata
    model.load_state_dict(state)
    optimizer = torch.optim.Adam(model.parameters())
    assert there_and_back(optimizer.state_dict()) == optimizer.state_dict()


@pytest.mark.parametrize("code", "?bBhHiIlLqQefdgFDG")
def test_numpy_arrays_and_scalars_come_back(code):
    for dtype in (np.dtype(code), np.dtype(code).newbyteorder(">")):
        array = np.arange(6).astype(dtype).reshape(2, 3)
        for value in (array, array.T, array[:0], array[0, 0], np.asfortranarray(array), array[::-1]):
            assert same(there_and_back(value), value)
    assert there_and_back(array).flags.writeable


def test_numpy_strings_and_times_come_back():
    for value in (
        np.array(["ä", "bc"]),
        np.array([b"a", b"bc"]),
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.array([1, 2], "m8[25us]"),
        np.datetime64("2020-01-01T00:00", "m"),
        np.timedelta64(3),
    ):
        assert same(there_and_back(value), value)


def test_long_bytes_long_lists_and_surrogates_come_back():
    values = [b"x" * 100_000, bytearray(5000), list(range(100_000)), [1.5] * 10, "\ud800", [1 << 64], [-(1 << 63) - 1]]
    assert same(there_and_back(values), values)


Point = namedtuple("Point", "x y")


@dataclass
class Setting:
    rate: float


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, 1, 2, object()]}, r"obj\['a'\]\[3\] is a object, .*dict, list or tuple.*allow_pickle=True on every"),
        ((1, [Setting(0.1)]), r"obj\[1\]\[0\] is a .*Setting, .*dataclasses.asdict"),
        ({3: Color.RED}, r"obj\[3\] is a .*Color, .*send its \.value"),
        ({"p": Point(1, 2)}, r"obj\['p'\] is a .*Point, .*_asdict\(\)"),
        (torch.ones(2).to_sparse(), r"obj is a tensor of layout torch.sparse_coo.*to_dense"),
        ([torch.ones(2, device="meta")], r"obj\[0\] is a tensor on meta.*tensor\.cpu\(\)"),
        (np.array([object()]), r"obj is a NumPy array of object; .*tolist"),
        (np.zeros(1, "i4,f4"), "NumPy array of .*columns of a structured"),
        ([datetime.datetime.now(ZoneInfo("Europe/Paris"))], r"obj\[0\] is a time in the zone Europe/Paris.*astimezone"),
        ({(1, Color.RED): 1}, r"obj, in a key or an element of a set,\[1\] is a .*Color"),
        ([lambda: 0], r"obj\[0\] is a function"),
        ([[torch.nn.Linear(1, 1)]], r"obj\[0\]\[0\] is a torch.nn.modules.linear.Linear"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_path(value, message):
    with pytest.raises(TypeError, match=message):
        encode(value, "obj")


def test_what_holds_itself_or_is_too_deep_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="or contains itself"):
        encode(loop, "obj")
    nested: object = 0
    for _ in range(MAX_DEPTH):
        nested = (nested,)
    assert same(there_and_back(nested), nested)


def test_a_pickle_needs_leave_on_both_sides():
    value = {"s": Setting(0.5)}
    encoded = encode(value, "obj", allow_pickle=True)
    assert encoded.body[0] == BodyFormat.PICKLE
    with pytest.raises(PickleRefused):
        decode(encoded.body, [])
    assert decode(encoded.body, [], allow_pickle=True) == value
    assert encode([1], "obj", allow_pickle=True).body[0] == BodyFormat.MSGPACK


CORPUS = [
    {"a": (1, 2.5, "ä", b"x", {1, 2}), "t": torch.arange(6).view(2, 3), 5: [None, True, 1 << 90]},
    [np.arange(4.0), np.float32(1), datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), uuid.UUID(int=5)],
    OrderedDict(a=Decimal("1.5"), b=deque([1], 3), c=range(5), d=Path("x"), e=torch.float16, f=1 + 2j),
]


def is_refused(body: bytes, buffers: list[torch.Tensor]) -> bool:
    """Returns True for the two expected errors; all others are passed on to the test."""
    try:
        decode(body, buffers)
    except (MalformedPayload, PickleRefused):
        return True
    return False


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=examples(500), deadline=60_000)
def test_random_bytes_raise_nothing_but_a_refusal(data, as_msgpack):
    is_refused(bytes([BodyFormat.MSGPACK]) + data if as_msgpack else data, [torch.zeros(8, dtype=torch.uint8)])


@pytest.mark.parametrize("value", CORPUS, ids=range(len(CORPUS)))
def test_changed_bytes_raise_nothing_but_a_refusal(value):
    encoded = encode(value, "obj")
    choose = random.Random(1)
    refused = 0
    for _ in range(2000):
        body = bytearray(encoded.body)
        for _ in range(choose.randint(1, 4)):
            body[choose.randrange(len(body))] = choose.randrange(256)
        body = body[: choose.randint(0, len(body))] if choose.random() < 0.3 else body
        refused += is_refused(bytes(body), encoded.buffers)
    assert 200 < refused < 2000, "some changes leave another value, most do not"


@given(st.sampled_from(CORPUS), st.randoms(use_true_random=False))
def test_a_body_cut_short_is_refused(value, random):
    encoded = encode(value, "obj")
    assert is_refused(encoded.body[: random.randrange(len(encoded.body))], encoded.buffers)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x07",
        b"\x01",
        b"\x01\xdd\xff\xff\xff\xff",
        b"\x01\xdf\xff\xff\xff\xff",
        b"\x01\xc6\xff\xff\xff\xff",
        b"\x01" + b"\xdd\x04\x00\x00\x00" * 30,
        b"\x01" + b"\x91" * 100_000,
        b"\x01" + b"\x81\x01\x91" * 50_000 + b"\xc0",
        b"\x01\x81\x18\x00",
        b"\x01\x81\x0a\x05",
        b"\x01\x81\x0a\xff",
        b"\x01\xd6\xff\x00\x00\x00\x00",
        b"\x01\xc7\x01\x05\x00",
        b"\x01\x82\x01\x90\x02\x90",
        b"\x01\x81\x03\x91\x90",
    ],
)
def test_false_lengths_are_refused_without_allocating_memory(body):
    tracemalloc.start()
    with pytest.raises(MalformedPayload):
        decode(body, [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


@pytest.mark.parametrize(
    "packed",
    [
        ["torch.float32", [3], False, 0],
        ["torch.float32", [-1, -2], False, 0],
        ["torch.float32", [2], False, 1],
        ["torch.nothing", [2], False, 0],
        ["torch.float32", [1 << 62, 4], False, 0],
        ["torch.int64", [1], True, 0],
        ["torch.float32", 2, False, 0],
    ],
)
def test_a_tensor_that_its_memory_does_not_fit_is_refused(packed):
    with pytest.raises(MalformedPayload):
        decode(b"\x01" + msgspec.msgpack.encode({30: packed}), [torch.zeros(8, dtype=torch.uint8)])
