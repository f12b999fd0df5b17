"""The gradients of a module in buckets, without those that no rank has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.parallel.ddp.buckets import bucket_params
from paceline.parallel.ddp.gradients import BucketGradients
from paceline.parallel.ddp.sparse import empty_gradient
from paceline.parallel.tracked_tensors import TrackedTensors


class GradientBuckets:
    """The gradients of the parameters that a module trains.

    Dense gradients are in buckets; sparse ones are averaged one by one after them. A number that stands for a parameter
    is its index in `params`.
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

        # - The gradients that every backward should compute, without those that `settle_present` has left out for good
        self._expected: list[BucketGradients | None] = [self._gradients_of(bucket.params) for bucket in self.buckets]
        self._expected_sparse = [at for at, name in enumerate(self.names) if name in tracked.sparse]
        # In a static graph, the parameters for which only other ranks have a gradient; this rank contributes zeros.
        self._absent: list[int] = []

        # - The gradients that are averaged now, also without those that `take_present` has left out of this backward.
        #   A bucket is None when no rank has any of its gradients.
        self.active = self._expected
        self._active_sparse = self._expected_sparse

    def _gradients_of(self, indices: Sequence[int]) -> BucketGradients:
        return BucketGradients([self.params[at] for at in indices], [self.names[at] for at in indices])

    def active_sparse(self) -> list[torch.nn.Parameter]:
        """Returns the parameters whose sparse gradients are averaged now."""
        return [self.params[at] for at in self._active_sparse]

    def active_sparse_names(self) -> list[str]:
        """Returns the names of these parameters."""
        return [self.names[at] for at in self._active_sparse]

    def is_last(self, bucket: int) -> bool:
        """Returns whether no bucket after this one is averaged."""
        return all(later is None for later in self.active[bucket + 1 :])

    def missing(self) -> list[str]:
        """Returns the names of the parameters that should have a gradient and have none."""
        missing = {name for gradients in self._expected if gradients is not None for name in gradients.missing()}
        missing.update(self.names[at] for at in self._expected_sparse if self.params[at].grad is None)
        return [name for name in self.names if name in missing]

    def names_without(self, ids: Collection[int]) -> set[str]:
        """Returns the names of the parameters whose `id` is not in `ids`."""
        return {name for name, param in zip(self.names, self.params, strict=True) if id(param) not in ids}

    def frozen(self) -> set[str]:
        """Returns the names of the parameters that no longer require a gradient."""
        return {name for name, param in zip(self.names, self.params, strict=True) if not param.requires_grad}

    def take_present(self, group: ProcessGroup) -> None:
        """Leaves the gradients that no rank has out of this backward, and sets those that only others have to zero."""
        anywhere = self._present_anywhere(group)
        self.active, self._active_sparse = self._restricted(anywhere)
        self._fill([at for at, has in enumerate(anywhere) if has])

    @contextmanager
    def only_present(self, group: ProcessGroup) -> Iterator[None]:
        """Returns a context in which gradients are left out as `take_present` does; after it, none is."""
        self.take_present(group)
        try:
            yield
        finally:
            self.active, self._active_sparse = self._expected, self._expected_sparse

    def are_incomplete(self) -> bool:
        """Returns whether a gradient is missing that `fill_absent` would not set."""
        absent = {self.names[at] for at in self._absent}
        return not absent.issuperset(self.missing())

    def any_present(self) -> bool:
        """Returns whether any parameter has a gradient."""
        return any(param.grad is not None for param in self.params)

    def settle_present(self, group: ProcessGroup) -> list[bool]:
        """Leaves the gradients that no rank has now out of all backwards, and notes those that only other ranks have.

        If no rank has any gradient, it does neither: that was no backward of the module's parameters.

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
        """Sets the gradients that, in a static graph, only other ranks have to zeros."""
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
