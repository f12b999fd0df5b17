"""ZeroRedundancyOptimizer: shards its state, and optionally gradients and parameters, across the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.group.buffers import count_writes
from paceline.comm.group.default import given_or_default
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.spans import STEPS
from paceline.train.autograd_graph import BackwardEnd
from paceline.train.ddp.bucket_assignment import MIB, caps_of, make_buckets
from paceline.train.ddp.distributed_data_parallel import DistributedDataParallel
from paceline.train.join import Join, Joinable, JoinHook
from paceline.train.module_tensors import broadcast_tensors
from paceline.train.zero.gradient_reducer import ClippingWatch, ShardedGradientReducer, clip, total_norm
from paceline.train.zero.optimizer_state import copy_options
from paceline.train.zero.partitioned_optimizer import (
    PartitionedOptimizer,
    Stage,
    replica_check,
    require_fit,
    synchronize_parameters,
)
from paceline.train.zero.sharded_parameters import ShardedParameters, find_units, names_of
from paceline.train.zero.shards import Shards, is_elementwise
from paceline.train.zero.state_storage import StateStorage


class ZeroRedundancyOptimizer(PartitionedOptimizer):
    """Shards the state of an optimizer across the ranks: each rank runs `optimizer_class` on a part of the parameters.

    Every parameter is owned by the rank that updates it (ZeRO, Rajbhandari et al. 2020). A parameter that exceeds a
    rank's even share is cut if the optimizer is `paceline.Lion` or one of torch's elementwise optimizers. Stage 1
    shards the optimizer's state. Stage 2 additionally shards the gradients, which are averaged on their owners and
    freed elsewhere. Stage 3 additionally shards the parameters, which other ranks hold only while a layer needs them.

    Args:
        params: a module, plain or wrapped in `DistributedDataParallel`; or parameters or parameter groups, as for any
            optimizer. Given a module, this optimizer averages the gradients, except in stage 1 with a
            `DistributedDataParallel`, which averages them itself. Given parameters, the program must average the
            gradients before `step`, for example with a module wrapper; stage 2 then frees gradients only in `step`.
        optimizer_class: an optimizer that updates each parameter independently, such as `torch.optim.AdamW`.
        process_group: the process group of the ranks; if None, the default group.
        parameters_as_bucket_view: has no effect; accepted for compatibility with torch.
        overlap: whether to average gradients on the group's progress thread during backward. In stage 3, this thread
            additionally prefetches the next layer's parameters.
        stage: the stage, 1, 2 or 3; stage 3 requires the module.
        module: the module, if `params` are groups of its parameters.
        bucket_cap_mb: the maximum size in MiB of the buckets in which gradients are averaged.
        master_dtype: the dtype, such as `torch.float32`, of master copies of parameters with lower precision, such as
            bfloat16. The optimizer updates the copies, and the parameters are set to the rounded copies. If None, the
            optimizer updates the parameters themselves.
        offload: a directory for a memory-mapped file that holds the master copies and the state, or "cpu" to hold them
            in CPU memory if the parameters are on a GPU. With "cpu", gradients and parameters are transferred through
            page-locked memory.
        defaults: keyword arguments for `optimizer_class`. torch's argument `overlap_with_ddp` must be False.

    Raises:
        CollectiveMismatchError: parameters or arguments differ between ranks; raised on every rank.
        TypeError: the optimizer evaluates the loss several times in a step, or `process_group` is not a Paceline
            group.
        ValueError: `overlap_with_ddp` is True; `stage` is not 1, 2 or 3; `stage` is 3 and there is no module, or its
            parameters are on several devices; or `offload` is "cpu" and parameters are on the CPU.
        OSError: no file can be created in the directory `offload`, or the disk is full.

    Example::

        optimizer = paceline.ZeroRedundancyOptimizer(model, torch.optim.AdamW, stage=2, lr=1e-3)
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap: bool = False,
        stage: Stage = 1,
        *,
        module: nn.Module | None = None,
        bucket_cap_mb: float = 4,
        master_dtype: torch.dtype | None = None,
        offload: str | os.PathLike[str] | None = None,
        **defaults: Any,
    ) -> None:
        if defaults.pop("overlap_with_ddp", False):
            raise ValueError(
                "ZeroRedundancyOptimizer: overlap_with_ddp=True needs a hook of torch's DistributedDataParallel; pass "
                "overlap=True, with which the averages and the updates overlap with the backward pass"
            )
        if isinstance(params, nn.Module):
            module = params
            params = module.parameters()
        self.process_group = given_or_default(process_group)
        require_fit(self.process_group, stage, module, optimizer_class)
        self.stage: Stage = stage
        self._overlap, self._bucket_caps = overlap, caps_of(int(bucket_cap_mb * MIB))
        self._averages = module is not None
        if isinstance(module, DistributedDataParallel):
            self._averages = stage > 1
            if self._averages:
                module.require_backward_grad_sync = False  # this optimizer averages the gradients instead
            module = module.module
        self._module = module
        self._rank = self.process_group.rank()
        self._shards = Shards(self._rank, self.process_group.size(), cuts=is_elementwise(optimizer_class))
        self._storage = StateStorage(master_dtype, offload, f"rank {self.process_group.me.rank}")
        self._copies = False  # whether the inner optimizer updates master copies on any rank
        self._ends = BackwardEnd()
        self._reducer: ShardedGradientReducer | None = None
        self._watch: ClippingWatch | None = None
        self._sharded: ShardedParameters | None = None
        Joinable.__init__(self)
        Optimizer.__init__(self, params, {})  # calls `add_param_group` for each group
        synchronize_parameters(
            self._module,
            self.param_groups,
            {"stage": stage, "optimizer_class": optimizer_class.__name__, **self._storage.arguments},
            self.process_group,
            self._storage.open(self._params()),
        )
        self._storage.make_masters(self._shards.mine())
        self._storage.settle(self._make_inner(optimizer_class, defaults))
        self._start()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that this rank owns and copies them to all ranks. Every rank must call this method.

        Args:
            closure: a function that computes the loss and its gradients; it is called once.

        Raises:
            TypeError: the stage is 2 or 3, and the caller is `torch.amp.GradScaler`.
        """
        self._require_own_scaler(f"in stage {self.stage}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._reducer is None:
            Join.notify_join_context(self)
        self._update()
        return loss

    @property
    def owns_gradients(self) -> bool:
        """Whether a shard's averaged gradient exists only on the owner of the shard."""
        return self.stage > 1 or self._copies

    @torch.no_grad()
    def _update(self) -> None:
        assert self._inner is not None
        if self._averages:
            STEPS.begin(self, "zero")
        self._consolidated = None
        self.own_part()
        copy_options(self.param_groups, self._inner.param_groups)
        if self._sharded is None:
            self._shards.follow()
        else:
            self._sharded.free_all()  # prefetched parameters would be outdated after the step
        self._shards.refresh_masters()
        self._storage.step(self._inner)
        for shard in self._shards.mine():
            shard.round_master()
        copy_options(self._inner.param_groups, self.param_groups)
        if self._sharded is None:
            self._shards.copy_from_owners(self.process_group)
        else:
            self._sharded.refresh()
        count_writes(shards[0].param for shards in self._shards.by_param)  # includes writes by other ranks
        if self.stage == 1:
            self._shards.forget_run_gradients()
        if self._averages and self._module is not None:
            root = 0 if self._reducer is None else self._reducer.active.index(True)
            broadcast_tensors(list(self._module.buffers()), self.process_group, root)

    def own_part(self) -> Optimizer:
        """Returns the inner optimizer, which holds this rank's parameters and gradients."""
        assert self._inner is not None
        if self._watch is not None:
            self._watch.check()
        self._shards.take_gradients(free=self.owns_gradients)
        self._shards.take_to_masters()
        return self._inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, and any state that a failed backward pass has left."""
        super().zero_grad(set_to_none)
        self._shards.forget_run_gradients(set_to_none)
        self._ends.forget()
        if self._reducer is not None:
            self._reducer.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which must be the same on every rank; parameters that were added earlier keep their owners."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._shards.add(group["params"])
        self._copies = self._copies or any(map(self._storage.copies, group["params"]))
        if self._inner is not None:
            self._storage.make_masters(self._shards.mine())
            self._inner.add_param_group(self._part_of(group))
            copy_options(self._inner.param_groups, self.param_groups)
            self._storage.settle(self._inner)
            self._stop()
            self._start()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the total norm of the gradients over all ranks to `max_norm`; returns the norm before clipping.

        In stages 2 and 3, `torch.nn.utils.clip_grad_norm_` would use only this rank's gradients.
        """
        self.own_part()
        gradients = self._shards.gradients()
        total = total_norm(gradients, norm_type, self.process_group, self._storage.gradient_device(self._params()))
        if not self.owns_gradients:
            gradients = [param.grad for param in self._params() if param.grad is not None]
        clip(gradients, total, max_norm)
        return total.float()

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Returns the hook for `Join`; accepts `divide_by_initial_world_size` if this object averages the gradients.

        Raises:
            ValueError: the stage is 3. Stage 3 gathers parameters in forward, and a rank without inputs does not run a
                forward pass.
        """
        if self.stage == 3:
            raise ValueError(
                f"rank {self.process_group.me.rank}: Join got a ZeroRedundancyOptimizer with stage=3, whose parameters "
                "are gathered in forward, and a rank without inputs runs no forward pass; use stage=2"
            )
        return super().join_hook(**kwargs)

    def _step_without_inputs(self) -> None:
        if self._reducer is not None:
            self.zero_grad()
            self._reducer.contribute_zeros()
        self._update()

    def _divide_by_initial(self, divides: bool) -> None:
        if self._reducer is not None:
            self._reducer.divide_by_initial_world_size = divides

    def full_parameters(self) -> AbstractContextManager[None]:
        """Returns a context in which every rank holds all parameters, for saving or loading the module in stage 3.

        All ranks must enter the context.
        """
        return nullcontext() if self._sharded is None else self._sharded.all_present()

    def _load(self, part: dict[str, Any]) -> Optimizer:
        inner = super()._load(part)
        self._storage.settle(inner)
        return inner

    def _start(self) -> None:
        if not self._averages:
            return
        params, by_param = self._params(), self._shards.by_param
        trained_shards = [shards for shards in by_param if shards[0].param.requires_grad]
        trained = [shards[0].param for shards in trained_shards]
        names = names_of(trained, self._module)
        units = find_units(self._module, params) if self.stage == 3 and self._module is not None else []
        if self.stage == 3:
            index_of = {id(param): index for index, param in enumerate(trained)}
            buckets = [[index_of[id(param)] for param in unit.params if id(param) in index_of] for unit in units]
        else:
            sizes, dtypes = [param.nbytes for param in trained], [param.dtype for param in trained]
            buckets = [list(bucket.params) for bucket in make_buckets(sizes, dtypes, self._bucket_caps)]
        self._reducer = ShardedGradientReducer(
            trained_shards,
            names,
            buckets,
            self.process_group,
            self._ends,
            shard=self.stage > 1,
            in_order=self.stage < 3,
            overlap=self._overlap,
            joinable=self,
            reduced=lambda bucket: self._sharded.free(bucket) if self._sharded is not None else None,
            replicas=replica_check(self._module, params, self.process_group) if self.stage < 3 else None,
        )
        if self.stage > 1:
            named, whose = dict(zip(names, trained, strict=True)), "the average only of what this rank owns"
            self._watch = ClippingWatch(named, f"rank {self.process_group.me.rank}", whose)
            self._ends.callbacks.append(self._watch.note)
        if self.stage == 3:
            shards_of = {id(shards[0].param): shards for shards in by_param}
            self._sharded = ShardedParameters(units, shards_of, self.process_group, self._ends, ahead=self._overlap)

    def _stop(self) -> None:
        if self._watch is not None:
            self._ends.callbacks.remove(self._watch.note)
        for part in (self._reducer, self._sharded):
            if part is not None:
                part.close()
