"""Settings that several arguments of `DistributedDataParallel` determine together."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.train.ddp.arguments import choose_bucket_caps, choose_buffer_sync, require_whole_pairs
from paceline.train.ddp.bucket_assignment import make_buckets

MIB = 1 << 20


@pytest.mark.parametrize(
    ("broadcast", "forward", "chosen"),
    [
        (None, None, (True, True)),
        (False, None, (False, False)),
        (None, False, (True, False)),
        (None, True, (True, True)),
    ],
)
def test_buffers_follow_the_later_argument(broadcast, forward, chosen):
    assert choose_buffer_sync(broadcast, forward) == chosen


def test_an_argument_that_has_no_effect_is_reported():
    with pytest.warns(FutureWarning, match="broadcast_buffers=False is ignored"):
        assert choose_buffer_sync(False, True) == (True, True)


def test_bucket_caps_are_given_in_mebibytes():
    assert choose_bucket_caps(25, [0.5, 2]) == (MIB // 2, 2 * MIB)
    assert max(choose_bucket_caps(25, None)) == 25 * MIB
    buckets = make_buckets([4, 4], ["float32"] * 2, choose_bucket_caps(0, None))
    assert [bucket.params for bucket in buckets] == [(1,), (0,)]
    with pytest.raises(ValueError, match="bucket_cap_mb is nan; it must be positive, or 0"):
        choose_bucket_caps(math.nan, None)
    with pytest.raises(ValueError, match="bucket_cap_mb_list is -1"):
        choose_bucket_caps(None, [1, -1])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((True, None, None, None, None), "deterministic=True needs logical_shards"),
        ((False, 8, None, None, None), "deterministic=True needs logical_shards"),
        ((True, 8, [0], None, None), "do not pass device_ids"),
        ((False, None, None, [("a", torch.ones(1))], None), "must be given together"),
        ((True, 8, None, [("a", torch.ones(1))], torch.ones(1)), "leave one of them out"),
    ],
)
def test_half_a_pair_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        require_whole_pairs(*arguments)
