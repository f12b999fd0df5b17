"""Assignment of parameters to buckets."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.ddp.bucket_assignment import FIRST_BUCKET_BYTES, MIB, caps_of, make_buckets

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
models = st.lists(st.tuples(st.integers(0, 100), st.sampled_from(DTYPES)), max_size=60)
caps = st.integers(1, 300)


@given(models, caps, caps)
def test_every_parameter_is_in_one_bucket(model, cap, first_cap):
    buckets = make_buckets([size for size, _ in model], [dtype for _, dtype in model], [min(first_cap, cap), cap])
    assert sorted(index for bucket in buckets for index in bucket.params) == list(range(len(model)))


@given(models, caps, caps)
def test_a_bucket_has_one_type_and_tells_its_bytes(model, cap, first_cap):
    for bucket in make_buckets([size for size, _ in model], [dtype for _, dtype in model], [min(first_cap, cap), cap]):
        assert len({model[index][1] for index in bucket.params}) == 1
        assert bucket.nbytes == sum(model[index][0] for index in bucket.params)


@given(models, caps, caps)
def test_only_a_single_parameter_makes_a_bucket_exceed_the_cap(model, cap, first_cap):
    for bucket in make_buckets([size for size, _ in model], [dtype for _, dtype in model], [min(first_cap, cap), cap]):
        assert bucket.nbytes <= cap or sum(model[index][0] > 0 for index in bucket.params) == 1


@given(models, caps, caps)
def test_a_bucket_is_closed_when_the_next_parameter_does_not_fit(model, cap, first_cap):
    buckets = make_buckets([size for size, _ in model], [dtype for _, dtype in model], [min(first_cap, cap), cap])
    for dtype in DTYPES:
        of_type = [bucket for bucket in buckets if model[bucket.params[0]][1] is dtype]
        for at, (bucket, later) in enumerate(pairwise(of_type)):
            limit = cap if at else min(first_cap, cap)
            assert bucket.nbytes + model[later.params[0]][0] > limit


@given(models, caps, caps)
def test_buckets_follow_the_order_in_which_backward_ends_them(model, cap, first_cap):
    buckets = make_buckets([size for size, _ in model], [dtype for _, dtype in model], [min(first_cap, cap), cap])
    last_computed = [min(bucket.params) for bucket in buckets]
    assert last_computed == sorted(last_computed, reverse=True)
    for bucket in buckets:
        assert list(bucket.params) == sorted(bucket.params, reverse=True)


@given(models, caps)
def test_the_first_bucket_of_a_type_is_small(model, cap):
    first_cap = max(1, cap // 4)
    seen = set()
    for bucket in make_buckets([size for size, _ in model], [dtype for _, dtype in model], [min(first_cap, cap), cap]):
        dtype = model[bucket.params[0]][1]
        if dtype not in seen:
            assert bucket.nbytes <= first_cap or sum(model[index][0] > 0 for index in bucket.params) == 1
        seen.add(dtype)


def test_types_that_alternate_do_not_cut_buckets():
    buckets = make_buckets([8] * 20, [torch.float32, torch.bfloat16] * 10, [1000])
    assert [len(bucket.params) for bucket in buckets] == [10, 10]


def test_the_default_caps_are_torchs():
    buckets = make_buckets([MIB // 2] * 60, [torch.float32] * 60, caps_of(25 * MIB))
    assert FIRST_BUCKET_BYTES == MIB
    assert [bucket.nbytes // MIB for bucket in buckets] == [1, 25, 4]


def test_no_parameters_make_no_buckets():
    assert make_buckets([], [], [25 * MIB]) == []


def test_each_bucket_of_a_type_has_its_own_cap():
    buckets = make_buckets([4] * 12, [torch.float32] * 12, [4, 12, 8])
    assert [bucket.nbytes for bucket in buckets] == [4, 12, 8, 8, 8, 8]


def test_buckets_follow_the_order_of_a_backward():
    buckets = make_buckets([4] * 6, [torch.float32] * 6, [8], order=[2, 0, 5, 4, 1, 3])
    assert [bucket.params for bucket in buckets] == [(2, 0), (5, 4), (1, 3)]


def test_a_bucket_may_reach_its_cap_and_exceed_it():
    buckets = make_buckets([10] * 7, [torch.float32] * 7, [1, 25], may_exceed=True)
    assert [bucket.params for bucket in buckets] == [(6,), (5, 4, 3), (2, 1, 0)]


@given(models, caps, caps)
def test_exceeding_buckets_are_never_more(model, cap, first_cap):
    sizes, dtypes, limits = [size for size, _ in model], [dtype for _, dtype in model], [min(first_cap, cap), cap]
    exceeding = [bucket for bucket in make_buckets(sizes, dtypes, limits, may_exceed=True) if bucket.nbytes]
    assert len(exceeding) <= len(make_buckets(sizes, dtypes, limits))
