"""Which gradients a module has, in which buckets, and which of them no rank or only other ranks have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.parallel.ddp.buckets import bucket_params
from paceline.parallel.ddp.gradients import BucketGradients
from paceline.parallel.ddp.sparse import empty_gradient
from paceline.parallel.tracked_tensors import TrackedTensors


class GradientBuckets:
    """The gradients of the parameters that a module trains.

    Dense gradients belong to the buckets; sparse ones are averaged one by one after them. Parameters are known by their
    index in `params`.
    """

    def __init__(self, tracked: TrackedTensors, bucket_caps_bytes: Sequence[int]) -> None:
        # - What the module trains, which never changes
        self.names = list(tracked.trained)
        self.params = list(tracked.trained.values())
        self.buckets = bucket_params(
            self.params,
            bucket_caps_bytes,
            left_out=[at for at, name in enumerate(self.names) if name in tracked.sparse],
        )

        # - What every backward should bring: without what `settle_present` has left out for good
        self._expected: list[BucketGradients | None] = [self._gradients_of(bucket.params) for bucket in self.buckets]
        self._expected_sparse = [at for at, name in enumerate(self.names) if name in tracked.sparse]
        # In a static graph, the parameters for which only other ranks have a gradient; zeros stand in for it here.
        self._absent: list[int] = []

        # - What is averaged now: also without what `take_present` has left out of this backward. A bucket is None when
        #   no rank has any of its gradients.
        self.active = self._expected
        self._active_sparse = self._expected_sparse

    def _gradients_of(self, indices: Sequence[int]) -> BucketGradients:
        return BucketGradients([self.params[at] for at in indices], [self.names[at] for at in indices])

    def active_sparse(self) -> list[torch.nn.Parameter]:
        """Returns the parameters whose sparse gradients are averaged now."""
        return [self.params[at] for at in self._active_sparse]

    def is_last(self, bucket: int) -> bool:
        """Whether no bucket after this one is averaged."""
        return all(later is None for later in self.active[bucket + 1 :])

    def missing(self) -> list[str]:
        """Returns the names of the parameters that should have a gradient and have none."""
        missing = {name for gradients in self._expected if gradients is not None for name in gradients.missing()}
        missing.update(self.names[at] for at in self._expected_sparse if self.params[at].grad is None)
        return [name for name in self.names if name in missing]

    def take_present(self, group: ProcessGroup) -> None:
        """Leaves out of this backward what no rank has; zeros stand in for what only other ranks have."""
        anywhere = self._present_anywhere(group)
        self.active, self._active_sparse = self._restricted(anywhere)
        self._fill([at for at, has in enumerate(anywhere) if has])

    def settle_present(self, group: ProcessGroup) -> list[bool]:
        """Leaves out of all backwards what no rank has now, and remembers what only other ranks have.

        Where no rank has any gradient nothing is settled: that was no backward of the module's parameters.

        Returns:
            For each parameter, whether any rank has a gradient for it.
        """
        mine = [param.grad is not None for param in self.params]
        anywhere = self._present_anywhere(group)
        if any(anywhere):
            self._absent = [at for at, has in enumerate(anywhere) if has and not mine[at]]
            self._expected, self._expected_sparse = self.active, self._active_sparse = self._restricted(anywhere)
        return anywhere

    def fill_absent(self) -> None:
        """Gives zeros to the parameters for which, in a static graph, only other ranks have a gradient."""
        self._fill(self._absent)

    def zeros(self) -> list[torch.Tensor]:
        """Returns a zero gradient for each parameter."""
        return [self._zero(at) for at in range(len(self.params))]

    def values(self) -> list[torch.Tensor | None]:
        """Returns each parameter's gradient."""
        return [param.grad for param in self.params]

    def set_values(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Sets each parameter's gradient."""
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient

    def _present_anywhere(self, group: ProcessGroup) -> list[bool]:
        if not self.params:
            return []
        present = torch.frombuffer(bytearray(param.grad is not None for param in self.params), dtype=torch.uint8)
        group.all_reduce(present, ReduceOp.MAX)
        return [bool(each) for each in present.tolist()]

    def _restricted(self, kept: Sequence[bool]) -> tuple[list[BucketGradients | None], list[int]]:
        restricted: list[BucketGradients | None] = []
        for bucket, gradients in zip(self.buckets, self._expected, strict=True):
            chosen = [index for index in bucket.params if kept[index]]
            if len(chosen) != len(bucket.params):
                gradients = self._gradients_of(chosen) if chosen else None
            restricted.append(gradients)
        return restricted, [at for at in self._expected_sparse if kept[at]]

    def _fill(self, indices: Sequence[int]) -> None:
        for at in indices:
            if self.params[at].grad is None:
                self.params[at].grad = self._zero(at)

    def _zero(self, at: int) -> torch.Tensor:
        param = self.params[at]
        return empty_gradient(param) if at in self._expected_sparse else torch.zeros_like(param)
