"""Averages buckets as they are, or in half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.group.default import default_group
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.group.work import Work
from paceline.parallel.ddp.futures import AnyFuture, DeferredFuture, future_of
from paceline.parallel.ddp.hook import GradBucket, Hook, Reduced

FutureHook = Callable[[object, GradBucket], "AnyFuture[Reduced]"]


def average(tensors: torch.Tensor | list[torch.Tensor], group: ProcessGroup) -> DeferredFuture[list[torch.Tensor]]:
    """Averages the tensors over the ranks in place; returns their future."""
    return future_of(group.all_reduce(tensors, ReduceOp.AVG, async_op=True))


def allreduce_hook(process_group: object, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages the bucket as the wrapper does without a hook, but in a flat copy.

    Args:
        process_group: the hook's state; None for the default group.
        bucket: the gradients.
    """
    return average(bucket.buffer(), group_of(process_group)).then(lambda done: done.value()[0])


def fp16_compress_hook(process_group: object, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages the bucket in float16, which halves the bytes; the engine adds in float32."""
    return fp16_compress_wrapper(allreduce_hook)(process_group, bucket)


def bf16_compress_hook(process_group: object, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages the bucket in bfloat16, which has float32's range and fewer digits than float16."""
    return bf16_compress_wrapper(allreduce_hook)(process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> FutureHook:
    """Returns a hook that calls `hook` with buckets in float16."""
    return compress_wrapper(torch.float16, hook)


def bf16_compress_wrapper(hook: Hook) -> FutureHook:
    """Returns a hook that calls `hook` with buckets in bfloat16."""
    return compress_wrapper(torch.bfloat16, hook)


def compress_wrapper(dtype: torch.dtype, hook: Hook) -> FutureHook:
    """Returns a hook that converts each bucket to `dtype` for `hook`, and its result back."""

    def compressed(state: object, bucket: GradBucket) -> AnyFuture[Reduced]:
        original = bucket.buffer()
        if original.is_floating_point():  # complex gradients are not converted
            bucket.set_buffer(original.to(dtype))
        future = hook(state, bucket)

        def decompress() -> Reduced:
            reduced = future.result() if isinstance(future, Work) else future.wait()
            return original.copy_(reduced if isinstance(reduced, torch.Tensor) else reduced[0])

        return DeferredFuture(decompress)

    return compressed


def group_of(process_group: object) -> ProcessGroup:
    """Returns the group that a hook's state names.

    Raises:
        TypeError: the state is not a group.
    """
    if process_group is None:
        return default_group()
    if not isinstance(process_group, ProcessGroup):
        raise TypeError(
            f"the communication hook's state is a {type(process_group).__name__}; it must be a paceline.ProcessGroup, "
            "or None for the default group"
        )
    return process_group
