"""ShardedGradientReducer: averages gradients on their owners during backward and frees them elsewhere (ZeRO stage 2).

A bucket is reduced when its last gradient is ready. With `in_order`, a bucket also waits for all earlier buckets, so
that all ranks reduce in the same order regardless of autograd's order. Buckets with missing gradients are reduced when
backward ends. `ClippingWatch` warns if a program changes gradients that are not averages over all ranks, for example
with torch's clip_grad_norm_.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.train.autograd_graph import BackwardEnd
from paceline.train.checks.check_settings import choose_checks
from paceline.train.checks.finite_check import GradientCheck
from paceline.train.checks.replica_check import ReplicaCheck
from paceline.train.join import Join, Joinable
from paceline.train.module_tensors import shares_memory
from paceline.train.training_events import RecordedBuckets
from paceline.train.zero.shards import Shard

_SAMPLED = 4  # the number of parameters to watch; torch's clip_grad_norm_ changes them all


class ClippingWatch:
    """Warns once if gradients are changed between a backward pass and the optimizer step.

    The message identifies this rank by `me`, such as "rank 3"; `description` states what a gradient is before the step.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], me: str, description: str) -> None:
        self._named = dict(named)
        self._me = me
        self._description = description
        self._versions: dict[str, int] = {}  # the gradients' versions at the end of a backward pass
        self._has_warned = False
        self._handles: list[RemovableHandle] = []

    def follow_backwards(self) -> None:
        """Records the versions of a few gradients whenever autograd has accumulated into them."""
        every = len(self._named) // _SAMPLED + 1
        for name, param in list(self._named.items())[::every]:
            if param.requires_grad and param.is_leaf:
                hook = partial(_note_for, weakref.ref(self), name)  # a weak reference does not keep the model alive
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def note(self) -> None:
        """Records the current versions of all gradients."""
        for name, param in self._named.items():
            self._note(name, param)

    def close(self) -> None:
        """Removes the hooks that `follow_backwards` installed; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check(self) -> None:
        """Warns, at most once, if a gradient has changed since its version was recorded; discards the records."""
        for name, version in self._versions.items():
            gradient = self._named[name].grad
            if gradient is not None and gradient._version > version and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._me}: the gradient of {name!r} was changed between backward and step(), where it is "
                    f"{self._description}. If torch.nn.utils.clip_grad_norm_ did that, each rank has clipped by "
                    "another norm: call optimizer.clip_grad_norm_(max_norm) instead, which clips by that of the "
                    "averages. Only a factor that is the same on every rank is harmless",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._versions.clear()

    def _note(self, name: str, param: torch.Tensor) -> None:
        if param.grad is None:
            self._versions.pop(name, None)
        else:
            self._versions[name] = param.grad._version


@eager
def _note_for(watch: weakref.ref[ClippingWatch], name: str, param: torch.Tensor) -> None:
    held = watch()
    if held is not None:
        held._note(name, param)


class ShardedGradientReducer:
    """Averages the gradients of sharded parameters over the ranks in `group`.

    Args:
        shards, names: the shards and the name of each parameter that requires a gradient.
        buckets: for each bucket, a list of indices into `shards`. The lists must be the same on every rank.
        group: the process group of the ranks.
        ends: the object that runs callbacks at the end of a backward pass.
        shard: whether only owners keep the averaged gradients. If False, all ranks keep them.
        in_order: whether to reduce the buckets in the given order, one at a time.
        overlap: whether to reduce on the group's progress thread during backward.
        joinable: the optimizer. Within `Join`, all buckets are reduced at the end of backward, where ranks without
            inputs can run the same collectives.
        reduced: a function that is called with a bucket's index when this rank no longer needs the bucket's parameters.
        replicas: the check that compares the ranks' replicas, or None if ranks hold different parts.
    """

    def __init__(
        self,
        shards: Sequence[Sequence[Shard]],
        names: Sequence[str],
        buckets: Sequence[Sequence[int]],
        group: ProcessGroup,
        ends: BackwardEnd,
        *,
        shard: bool,
        in_order: bool,
        overlap: bool,
        joinable: Joinable,
        reduced: Callable[[int], None],
        replicas: ReplicaCheck | None,
    ) -> None:
        self._params = [its_shards[0].param for its_shards in shards]
        self._names = list(names)
        named = dict(zip(names, self._params, strict=True))
        self._check = GradientCheck(named, group) if choose_checks(None).are_on else None
        self._replicas = replicas
        self._backwards = 0
        self._shards = [list(its_shards) for its_shards in shards]
        # One flag per parameter: whether this rank keeps the gradient of the whole parameter.
        self._keeps = [not shard or (parts[0].is_whole and parts[0].is_mine) for parts in shards]
        self._buckets = [list(bucket) for bucket in buckets]
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._group = group
        self._ends = ends
        self._shard = shard
        self._in_order = in_order
        self._overlap = overlap
        self._reduced = reduced
        self._joinable = joinable
        self.divide_by_initial_world_size = True  # determines the divisor within `Join`
        self.active = [True] * group.size()  # one flag per rank: whether it participated in the latest backward pass
        self._scale = 1.0
        self._recorded = RecordedBuckets("zero")
        self._lock = threading.Lock()  # autograd calls `_arrive` on one thread per device
        ends.callbacks.append(self._finish)
        self._handles = []
        for index, param in enumerate(self._params):
            if shard and self._keeps[index]:
                self._handles.append(param.register_hook(partial(self._set_aside, index)))
            self._handles.append(param.register_post_accumulate_grad_hook(partial(self._arrive, index)))
        self.forget()

    def close(self) -> None:
        """Removes the hooks from the parameters; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._finish in self._ends.callbacks:
            self._ends.callbacks.remove(self._finish)

    def forget(self) -> None:
        """Resets the reducer to its state before a backward pass."""
        self._arrived: set[int] = set()
        self._done = [False] * len(self._buckets)
        self._left = [len(bucket) for bucket in self._buckets]
        self._earlier: dict[Shard, torch.Tensor] = {}
        self._flying: list[tuple[Work, list[tuple[Shard, torch.Tensor]]]] = []
        self._recorded.forget()
        if self._check is not None:
            self._check.forget()

    @eager
    def _set_aside(self, index: int, _: torch.Tensor) -> None:
        """Saves the average from an earlier backward pass before autograd can accumulate into it."""
        param = self._params[index]
        if param.grad is not None:
            self._earlier[self._shards[index][0]] = param.grad
            param.grad = None

    @eager
    def _arrive(self, index: int, _: torch.Tensor) -> None:
        self._ends.begin()
        with self._lock:
            self._count(index)

    def _count(self, index: int) -> None:
        """Records that a gradient is ready, and reduces buckets that are now complete and due."""
        bucket = self._bucket_of[index]
        if index in self._arrived:
            raise RuntimeError(
                f"rank {self._group.me.rank}: parameter {index} got two gradients in one backward, "
                "because it is used in several graphs, for example by reentrant activation checkpointing; use "
                "checkpoint(..., use_reentrant=False)"
            )
        self._arrived.add(index)
        self._left[bucket] -= 1
        if self._joinable._join_config.enable:
            return
        if not self._in_order:
            if self._left[bucket] == 0:
                self._reduce(bucket, self._buckets[bucket])
            return
        while bucket < len(self._buckets) and self._left[bucket] == 0 and (bucket == 0 or self._done[bucket - 1]):
            self._reduce(bucket, self._buckets[bucket])
            bucket += 1

    def _reduce(self, bucket: int, indices: Sequence[int]) -> None:
        self._recorded.ready(bucket, sum(self._params[index].nbytes for index in indices))
        if self._check is not None:
            arrived = sorted(self._arrived.intersection(indices))
            own = ((self._names[index], self._params[index].grad) for index in arrived)
            self._check.look_at({name: gradient for name, gradient in own if gradient is not None})
        calls: dict[tuple[int, torch.dtype, torch.device], list[tuple[Shard, torch.Tensor]]] = {}
        for index in indices:
            for shard, gradient in self._take(index):
                owner = shard.owner if self._shard else -1
                calls.setdefault((owner, gradient.dtype, gradient.device), []).append((shard, gradient))
        for (owner, *_), members in calls.items():
            gradients = [gradient for _, gradient in members]
            if owner >= 0:
                work = self._group.reduce(gradients, owner, ReduceOp.AVG, async_op=self._overlap)
            else:
                work = self._group.all_reduce(gradients, ReduceOp.AVG, async_op=self._overlap)
            if work is None:
                self._settle(members)
            else:
                self._flying.append((work, members))
        self._recorded.sent(bucket)
        self._done[bucket] = True
        self._reduced(bucket)

    def _take(self, index: int) -> list[tuple[Shard, torch.Tensor]]:
        """Splits this rank's gradient into the owners' parts, whose memory the reduction overwrites."""
        param, shards = self._params[index], self._shards[index]
        gradient = param.grad
        if index not in self._arrived:
            if gradient is not None and self._shard and self._keeps[index]:
                self._earlier[shards[0]] = gradient
            if gradient is None or self._shard:
                gradient = shards[0].zeros()
        assert gradient is not None
        is_written = self._overlap or not self._shard or any(shard.is_mine for shard in shards)
        if is_written and shares_memory(gradient):
            gradient = gradient.clone()  # other layers may still use the shared memory
        param.grad = None
        gradient = gradient.detach()
        if not self._shard:
            return [(shards[0], gradient)]
        return [(shard, shard.run_of_any(gradient)) for shard in shards]

    def _settle(self, members: Sequence[tuple[Shard, torch.Tensor]]) -> None:
        for shard, gradient in members:
            if self._scale != 1:
                gradient.mul_(self._scale)
            if not self._shard or (shard.is_whole and shard.is_mine):
                earlier = self._earlier.pop(shard, None)
                shard.param.grad = gradient if earlier is None else earlier.add_(gradient)
            elif shard.is_mine:
                shard.add_gradient(gradient)

    def _finish(self) -> None:
        """Reduces all remaining buckets at the end of a backward pass."""
        Join.notify_join_context(self._joinable)
        self._finish_with(is_active=True)

    def contribute_zeros(self) -> None:
        """Runs the collectives of the other ranks' backward pass on a rank without gradients."""
        self.forget()
        self._finish_with(is_active=False)

    def _finish_with(self, is_active: bool) -> None:
        count = len(self._params)
        somewhere = torch.zeros(count + self._group.size(), dtype=torch.uint8, device="cpu")
        somewhere[list(self._arrived)] = 1
        somewhere[count + self._group.rank()] = is_active
        self._group.all_reduce(somewhere, ReduceOp.MAX)
        present: list[int] = somewhere.tolist()
        self.active = [bool(flag) for flag in present[count:]]
        self._scale = 1.0 if self.divide_by_initial_world_size else self._group.size() / sum(self.active)
        for bucket, done in enumerate(self._done):
            if not done:
                self._reduce(bucket, [index for index in self._buckets[bucket] if present[index]])
        flying, self._flying = self._flying, []
        for work, members in flying:
            work.wait()
            self._settle(members)
        self._backwards += 1
        if self._check is not None:
            updated = [param.grad for param in self._params] + [
                shard.updated.grad for shards in self._shards for shard in shards if shard.updated is not None
            ]
            self._check.end(self._backwards, [gradient for gradient in updated if gradient is not None])
        if self._replicas is not None:
            self._replicas.end(self._backwards)
        self.forget()


def total_norm(
    gradients: Sequence[torch.Tensor], norm_type: float, group: ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Computes the total norm of the gradients on all ranks, in float64 on `device`; some ranks may have no gradients.

    The type of `device` must be the same on all ranks.
    """
    powers = norm_powers(gradients, norm_type, device)
    reduce_powers(powers, norm_type, group)
    return powers if norm_type == float("inf") else powers.pow(1 / norm_type)


def norm_powers(gradients: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Returns the sum of the absolute values raised to the power `norm_type`, or their maximum if it is infinite.

    The result is in float64 on `device`.
    """
    norms = [
        torch.linalg.vector_norm(gradient, norm_type, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack([norm.double().to(device) for norm in norms])
    return together.max() if norm_type == float("inf") else together.pow(norm_type).sum()


def reduce_powers(powers: torch.Tensor, norm_type: float, group: ProcessGroup) -> None:
    """Replaces the result of `norm_powers` with the result for the gradients of all ranks."""
    group.all_reduce(powers, ReduceOp.MAX if norm_type == float("inf") else ReduceOp.SUM)


def clip(gradients: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Scales gradients by a common factor so that their total norm, which was `total`, is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, this function does not wait for the device.
    """
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    on_devices = {scale.device: scale}
    for gradient in gradients:
        if gradient.device not in on_devices:
            on_devices[gradient.device] = scale.to(gradient.device)
        gradient.detach().mul_(on_devices[gradient.device])
