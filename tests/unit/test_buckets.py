from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.buckets import make_buckets

TYPES = [torch.float32, torch.bfloat16]


@given(
    params=st.lists(st.tuples(st.integers(0, 100), st.sampled_from(TYPES)), max_size=50),
    cap=st.integers(1, 200),
    first=st.integers(1, 200),
)
def test_buckets_hold_every_parameter_once_in_reverse_order_within_the_cap(params, cap, first):
    sizes, dtypes = [size for size, _ in params], [dtype for _, dtype in params]
    buckets = make_buckets(sizes, dtypes, cap, first)
    assert [index for bucket in buckets for index in bucket.params] == list(reversed(range(len(params))))
    for at, bucket in enumerate(buckets):
        assert len({dtypes[index] for index in bucket.params}) == 1
        assert bucket.nbytes == sum(sizes[index] for index in bucket.params)
        assert (
            bucket.nbytes <= (min(first, cap) if at == 0 else cap) or len([i for i in bucket.params if sizes[i]]) == 1
        )
