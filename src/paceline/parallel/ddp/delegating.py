"""The part of DistributedDataParallel that trains in an elastic job, where ranks come and go."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from paceline.group.process_group import ProcessGroup
from paceline.group.wire import WireKind
from paceline.parallel.ddp.elsewhere import Averages, DelegatingReducer
from paceline.parallel.ddp.joining import JoinableModule
from paceline.parallel.join import JoinHook


class DelegatingModule(JoinableModule):
    """A wrapped module whose gradients somebody else may average."""

    process_group: ProcessGroup
    module: nn.Module
    _averages: Averages | None = None
    wire: WireKind | None
    _bucket_caps: tuple[int, ...]

    def weight(self, weight: float) -> None:
        """Sets the weight of this rank's next backward in the mean over the ranks; it is 1 otherwise.

        Needs a `paceline.ElasticState` that holds this module. With the number of a batch's tokens, for example, the
        gradients are the mean over all ranks' tokens if each rank's loss is the mean over its own. If all ranks have
        weight zero, the gradients stay as they were before the forward.

        Args:
            weight: a number that is not negative.

        Raises:
            RuntimeError: no ElasticState holds this module.
            ValueError: the weight is negative, infinite or NaN.
        """
        if self._averages is None:
            raise RuntimeError(
                f"rank {self.process_group.me.rank}: weight({weight}) was called on a DistributedDataParallel that no "
                "ElasticState holds; only elastic jobs weight their ranks, others multiply the loss by the weight over "
                "the mean weight"
            )
        self._averages.set_weight(weight)

    def average_by(self, averages: Averages) -> tuple[list[nn.Parameter], Callable[[], list[torch.Tensor]]]:
        """Has `averages` average the gradients from now on, and copy the buffers where that was asked for.

        Returns:
            The parameters whose gradients are averaged, and what returns the buffers that must be the same everywhere.

        Raises:
            ValueError: the module was wrapped with an option that needs ranks which stay.
        """
        self._require_delegable()
        self._reducer.close()
        reducer = DelegatingReducer(
            self._watched.tracked,
            self._bucket_caps,
            self.process_group,
            averages,
            name=type(self.module).__name__,
            find_unused=self.find_unused_parameters or self.static_graph,
            checks=self._reducer.checks,
        )
        weakref.finalize(self, reducer.close).atexit = False
        self._reducer, self._averages = reducer, averages
        return reducer.params, self._watched.current_buffers if self.forward_sync_buffers else list

    def skip_batch(self) -> None:
        """Takes part in the mean of the other ranks' gradients; see `ElasticState.skip_batch`."""
        assert isinstance(self._reducer, DelegatingReducer)
        self._reducer.skip()

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Returns what this module does in `Join`; takes `divide_by_initial_world_size`.

        Raises:
            ValueError: the module is `deterministic`, or has `delay_all_reduce_named_params`.
            RuntimeError: an ElasticState holds the module.
        """
        self._require_not_elastic("Join", "its StatefulLoader gives every rank a batch in every step")
        return super().join_hook(**kwargs)

    def require_averaged(self) -> None:
        """Requires that the latest backward was averaged.

        Raises:
            RuntimeError: it was not, since parameters have no gradient.
        """
        assert isinstance(self._reducer, DelegatingReducer)
        self._reducer.require_averaged()

    def _require_delegable(self) -> None:
        tracked = self._watched.tracked
        refused = {
            "deterministic=True; use LogicalShards": self._replica is not None,
            "delay_all_reduce_named_params": self._delayed is not None,
            "a communication hook, or a reduce_dtype": self._reducer.comm_hook is not None,
            "overlap=True; in an elastic job gradients are averaged when backward ends": self.asks_for_overlap,
            "process_group; leave it out, since an elastic job has no other group": self.process_group.size() != 1,
            "wire; workers that come and go average gradients exactly": self.wire is not None,
            "parameters on other devices than the CPU": any(not each.is_cpu for each in tracked.trained.values()),
            "sparse gradients; use sparse=False": bool(tracked.sparse),
            "SyncBatchNorm, whose forward needs all ranks": any(
                isinstance(each, nn.SyncBatchNorm) or type(each).__name__ == "SyncBatchNorm"
                for each in self.module.modules()
            ),
        }
        if found := [option for option, is_used in refused.items() if is_used]:
            raise ValueError(
                f"ElasticState got a DistributedDataParallel with {found[0]}: that needs ranks which stay, and those "
                "of an elastic job come and go"
            )

    def _require_not_elastic(self, call: str, instead: str) -> None:
        if self._averages is not None:
            raise RuntimeError(
                f"{call} was called on a DistributedDataParallel that an ElasticState holds, where ranks come and go; "
                f"{instead}"
            )
