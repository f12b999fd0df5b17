"""Settings that depend on a combination of arguments of `DistributedDataParallel`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline
from paceline.parallel import hooks
from paceline.train.ddp.arguments import choose_bucket_caps, choose_buffer_sync, require_hook, require_whole_pairs
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


def annotated(bucket: object, result: object) -> Callable[..., object]:
    def hook(state: object, bucket: object) -> object:
        return None

    hook.__annotations__ = {"state": object, "bucket": bucket, "return": result}
    return hook


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (annotated(int, torch.futures.Future[torch.Tensor]), "`bucket` is annotated as <class 'int'>"),
        (annotated(list[torch.Tensor], Any), "`bucket` is annotated as list"),
        (annotated(paceline.GradBucket, int), "annotated to return <class 'int'>"),
        (annotated(torch.distributed.GradBucket, torch.Tensor), "annotated to return"),
        (annotated(paceline.GradBucket, None), "annotated to return None"),
    ],
)
def test_a_hook_with_a_wrong_annotation_is_refused_as_by_torch(hook, text):
    with pytest.raises(ValueError, match=text):
        require_hook(hook)


@pytest.mark.parametrize(
    "hook",
    [
        lambda state, bucket: None,
        annotated(torch.distributed.GradBucket, torch.futures.Future[torch.Tensor]),
        annotated(paceline.GradBucket, hooks.DeferredFuture[torch.Tensor]),
        annotated(object, torch.futures.Future[torch.Tensor] | paceline.Work),
        annotated("GradBucket", "Future"),
        annotated(Any, Any),
        *(getattr(hooks, name) for name in hooks.__all__ if name.endswith("_hook")),
    ],
)
def test_a_hook_with_other_annotations_is_accepted(hook):
    require_hook(hook)
