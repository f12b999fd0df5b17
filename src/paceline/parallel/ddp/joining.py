"""The part of DistributedDataParallel that trains on uneven inputs, within `Join`."""

from __future__ import annotations

import torch

from paceline.group.process_group import ProcessGroup
from paceline.parallel.ddp.delayed import DelayedParameters
from paceline.parallel.ddp.join_hook import DdpJoinHook, UnevenSteps
from paceline.parallel.ddp.torch_names import TorchNames
from paceline.parallel.join import Join, Joinable, JoinHook
from paceline.parallel.sharded.replica import ShardedReplica


class JoinableModule(TorchNames, Joinable):
    """A wrapped module whose ranks may run out of inputs at different times."""

    _steps: UnevenSteps
    _delayed: DelayedParameters | None
    _replica: ShardedReplica | None

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Returns a context in which ranks may run out of inputs at different times.

        A rank that has run out takes part in the others' steps with zeros; at the end all ranks receive the parameters
        and buffers of one that trained longest. Every step must consist of one forward and one backward.

        Args:
            divide_by_initial_world_size: whether gradients are divided by the number of all ranks, which gives every
                input the same weight; otherwise by the number of ranks that still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: whether all ranks raise an error instead, as soon as one has run out.

        Example::

            with model.join():
                for inputs, targets in loader:  # its length differs between ranks
                    loss_function(model(inputs), targets).backward()
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Returns what this module does in `Join`; takes `divide_by_initial_world_size`.

        Raises:
            ValueError: the module is `deterministic`, which divides every step evenly among all ranks, or it has
                `delay_all_reduce_named_params`, in whose averages a rank without inputs cannot take part.
        """
        self._require_not_deterministic("Join")
        if self._delayed is not None:
            raise ValueError(
                "Join got a module that was wrapped with delay_all_reduce_named_params; wrap it without, or give all "
                "ranks as many inputs"
            )
        self._steps.divides_by_initial_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        return DdpJoinHook(self._reducer, self._watched, self._steps, self.process_group, self.forward_sync_buffers)

    @property
    def join_device(self) -> torch.device:
        """Returns the device of the parameters."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Returns the ranks that take part."""
        return self.process_group

    def _announce_step(self) -> int:
        """Announces a step to the ranks without inputs, and returns the rank whose buffers are copied."""
        Join.notify_join_context(self)
        return self._steps.announce(self._reducer, self.require_backward_grad_sync, self.will_sync_module_buffers())

    def _require_not_deterministic(self, call: str) -> None:
        if self._replica is not None:
            raise ValueError(
                f"{call} got a module with deterministic=True, whose gradients are added in a fixed order; "
                "wrap it without deterministic"
            )
