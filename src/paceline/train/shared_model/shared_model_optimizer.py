"""SharedModelOptimizer: trains one copy of a model on each host, shared by the host's ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline import _core
from paceline.comm.engine.channel import DTYPE_CODES
from paceline.comm.group.default import given_or_default
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.spans import STEPS
from paceline.train.checks.check_settings import choose_checks
from paceline.train.checks.finite_check import GradientCheck
from paceline.train.ddp.distributed_data_parallel import DistributedDataParallel
from paceline.train.join import Join, Joinable
from paceline.train.module_tensors import broadcast_tensors
from paceline.train.shared_model.gradient_exchange import GradientExchange, groups_by_host
from paceline.train.shared_model.shared_parameters import SharedParameters, named_with, unshareable_reason
from paceline.train.shared_model.shared_shards import ReadyRound, SharedShards
from paceline.train.zero.gradient_reducer import ClippingWatch, clip, total_norm
from paceline.train.zero.optimizer_state import copy_options
from paceline.train.zero.partitioned_optimizer import (
    PartitionedOptimizer,
    require_one_evaluation,
    synchronize_parameters,
)
from paceline.train.zero.shards import is_elementwise

# The minimum size of a round, whose gradients are averaged and applied together. For this many bytes, the overhead of
# Python and of waiting for other ranks is small.
LEAST_ROUND_BYTES = 4 << 20


class SharedModelOptimizer(PartitionedOptimizer):
    """Trains one copy of a model per host: a host's ranks share the parameters, and each rank updates a part of them.

    The parameters are moved to memory that all ranks on a host map. Each rank computes its own gradients. In `step`, a
    rank reads its slice of the gradients from the other ranks' memory, averages it, and updates its slice of the
    parameters with `optimizer_class` while the averages are in the cache. The updated parameters need no copies,
    because they are in shared memory. A host with n ranks thus stores the parameters and the optimizer's state once
    instead of n times, and each rank performs 1/n of the optimizer's work.

    This class differs from `ZeroRedundancyOptimizer` in that ranks have no private parameters. A write by one rank
    changes the parameters for all ranks, so only this optimizer may write to them (see `full_parameters`). There are no
    stages and no overlap, because all communication happens in `step`.

    Each rank keeps its own gradients until `step`; they accumulate over several backward passes without communication.
    To clip gradients or scale losses, use `clip_grad_norm_` and `paceline.GradScaler`, which operate on the averages.

    Args:
        module: the model, plain or wrapped in `DistributedDataParallel`, which then no longer averages gradients. The
            parameters must be on the CPU. Rank 0's parameters and buffers are copied to all ranks. Buffers are not
            shared; they are copied from rank 0 after each step.
        optimizer_class: an optimizer that updates each parameter independently, such as `torch.optim.AdamW`. Torch's
            elementwise optimizers and `paceline.Lion` update flat slices of parameters; other optimizers update whole
            parameters.
        params: parameters or parameter groups of the module, as for any optimizer; if None, all parameters.
        process_group: the process group of the ranks; if None, the default group. All hosts must have the same number
            of ranks.
        defaults: keyword arguments for `optimizer_class`.

    Raises:
        CollectiveMismatchError: parameters or arguments differ between ranks; raised on every rank.
        TypeError: the optimizer evaluates the loss several times in a step, or `process_group` is not a Paceline
            group.
        ValueError: the group's engine is not "paceline", hosts have different numbers of ranks, or a parameter cannot
            be shared (the message gives the reason).

    Example::

        optimizer = paceline.SharedModelOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        params: Iterable[Any] | None = None,
        process_group: ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        self.process_group = given_or_default(process_group)
        require_one_evaluation(optimizer_class, self.process_group)
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = False  # this optimizer averages the gradients instead
            module = module.module
        self._module = module
        self._groups = groups_by_host(self.process_group)
        host, cuts = self._groups.host, is_elementwise(optimizer_class)
        self._shards: SharedShards = SharedShards(host.rank(), host.size(), cuts, LEAST_ROUND_BYTES)
        self._has_averages = False  # whether `own_part` has already averaged the gradients
        self._steps = 0
        self._watch = ClippingWatch({}, "", "")
        Joinable.__init__(self)
        Optimizer.__init__(self, module.parameters() if params is None else params, {})
        named = self._named()
        arguments: dict[str, object] = {"optimizer_class": optimizer_class.__name__, "shared": True}
        synchronize_parameters(
            module, self.param_groups, arguments, self.process_group, unshareable_reason(module, named)
        )
        self._parameters = SharedParameters.of(module, self.process_group, self._groups.ranks)
        self._parameters.add(named)
        self._shards.add(self._params())
        self._make_inner(optimizer_class, defaults)
        self._start()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages the gradients and updates the parameters that this rank owns; every rank must call this method.

        The call returns when all ranks on the host have updated their slices.

        Args:
            closure: a function that computes the loss and its gradients; it is called once.

        Raises:
            TypeError: the caller is `torch.amp.GradScaler`.
            RuntimeError: a rank has written to the parameters since the last step, or an earlier step failed; raised on
                every rank.
        """
        self._require_own_scaler("with a SharedModelOptimizer")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        Join.notify_join_context(self)
        self._update()
        return loss

    @property
    def owns_gradients(self) -> bool:
        """Always True, because a shard's averaged gradient exists only on the owner of the shard."""
        return True

    @torch.no_grad()
    def _update(self, has_inputs: bool = True) -> None:
        assert self._inner is not None
        STEPS.begin(self, "one copy")
        self._consolidated = None
        copy_options(self.param_groups, self._inner.param_groups)
        needs_averages = self._agree(has_inputs)
        with self._parameters.updating():
            if needs_averages:
                self._step_by_round()
            else:
                self._inner.step()
            self._send_buffers(has_inputs)
            self._groups.host.barrier()  # no rank may read a parameter before all are updated
        self._forget_averages()
        copy_options(self._inner.param_groups, self.param_groups)

    def _agree(self, has_inputs: bool = True) -> bool:
        """Waits until all ranks have entered the step; returns whether gradients must still be averaged."""
        self._parameters.require_whole()
        needs = not self._has_averages or self._exchange.is_outdated()
        if needs:
            self._watch.check()
        return self._exchange.agree(self._parameters.changed(), has_inputs, needs)

    def _forget_averages(self) -> None:
        self._has_averages = False
        self._exchange.forget()

    def _step_by_round(self) -> None:
        assert self._inner is not None
        groups = self._inner.param_groups
        everything = [group["params"] for group in groups]
        for ready, is_updated in self._averaged_rounds(whole=False):
            if is_updated or not self._shards.cuts:
                continue
            updated = ready.updated
            for group, params in zip(groups, everything, strict=True):
                group["params"] = [param for param in params if id(param) in updated]
            try:
                self._inner.step()
            finally:
                for group, params in zip(groups, everything, strict=True):
                    group["params"] = params
        if not self._shards.cuts:
            self._inner.step()

    def own_part(self) -> Optimizer:
        """Averages this step's gradients, and returns the inner optimizer, which holds this rank's averages.

        Every rank must call this method. A subsequent `step` applies the gradients in the inner optimizer.
        """
        assert self._inner is not None
        if self._join_config.enable:
            raise RuntimeError(
                f"rank {self.process_group.me.rank}: clip_grad_norm_() and GradScaler need the averages of all ranks' "
                "gradients before step(), and within Join a rank without inputs only participates in step(); leave "
                "them out"
            )
        if not self._has_averages or self._exchange.is_outdated():
            self._agree()
            for _ in self._averaged_rounds(whole=True):
                pass
            self._exchange.remember()
            self._has_averages = True
        return self._inner

    def _averaged_rounds(self, whole: bool) -> Iterator[tuple[ReadyRound, bool]]:
        """Averages the gradients round by round; yields each round and whether the core has applied its update."""
        in_core = self._exchange.may_update and not whole
        if in_core:
            self._core_updates.begin_step()
        for number, ready in enumerate(self._exchange.rounds(whole)):
            update = self._core_updates.begin(ready) if in_core else None
            if number == 0 and self._check is not None:
                self._average_under(self._check, ready, update)
            else:
                self._exchange.average(ready, update)
            yield ready, update is not None
        self._exchange.release()

    def _average_under(self, check: GradientCheck, ready: ReadyRound, update: _core.Update | None) -> None:
        """Averages the first round of a step, and completes the check of this step's gradients."""
        self._steps += 1
        if check.has_found:
            check.end(self._steps)  # the check reads parameters, so it must precede any update in this step
            self._exchange.average(ready, update)
            return
        self._exchange.average(ready, update, stores=check.is_looking)
        check.end(self._steps, [average for _, average in ready.averages])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients and discards averages."""
        super().zero_grad(set_to_none)
        self._forget_averages()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which must be the same on every rank; parameters that were added earlier keep their owners."""
        super().add_param_group(param_group)
        if self._inner is None:
            return
        group = self.param_groups[-1]
        self._parameters.add(self._named())
        self._shards.add(group["params"])
        self._inner.add_param_group(self._part_of(group))
        copy_options(self._inner.param_groups, self.param_groups)
        self._start()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Averages the gradients and clips the norm of the averages to `max_norm`; returns the norm before clipping.

        Every rank must call this method before `step`. `torch.nn.utils.clip_grad_norm_` would clip each rank's own
        gradients instead of the averages.
        """
        self.own_part()
        gradients = self._shards.gradients()
        total = total_norm(gradients, norm_type, self._groups.host, torch.device("cpu"))
        clip(gradients, total, max_norm)
        return total.float()

    def full_parameters(self) -> AbstractContextManager[None]:
        """Returns a context in which every rank has a private copy of the parameters and may modify this copy.

        All ranks must enter the context. On exit, rank 0's parameters are copied to all ranks.
        """
        return self._parameters.private()

    def _step_without_inputs(self) -> None:
        self.zero_grad()
        self._update(has_inputs=False)

    def _divide_by_initial(self, divides: bool) -> None:
        self._exchange.divides_by_active = not divides

    def _own_state(self) -> dict[int, dict[str, object]]:
        return super()._own_state() if self._groups.is_first else {}  # the state is the same on every host

    def _send_buffers(self, has_inputs: bool) -> None:
        buffers = list(self._module.buffers())
        if buffers:
            root = self._exchange.first_active(has_inputs) if self._exchange.idle else 0
            broadcast_tensors(buffers, self.process_group, root)

    def _named(self) -> dict[str, torch.Tensor]:
        return named_with(self._module, self._params())

    def _start(self) -> None:
        names = {id(param): name for name, param in self._named().items()}
        in_groups = [shards[0].param for shards in self._shards.by_param]
        trained = {names[id(param)]: param for param in in_groups if param.requires_grad}
        self._check = GradientCheck(trained, self.process_group) if choose_checks(None).are_on else None
        self._exchange = GradientExchange(
            self._shards, [names[id(param)] for param in in_groups], self._groups, self._check
        )
        assert self._inner is not None
        self._core_updates = FusedUpdates(self._inner)
        self._watch.close()
        self._watch = ClippingWatch(trained, f"rank {self.process_group.me.rank}", "this rank's own, not the average")
        self._watch.follow_backwards()


_DTYPES = (torch.float32, torch.float64)
_address = torch.Tensor.data_ptr


class _Group(NamedTuple):
    """A parameter group's options in the current step, and the names of its parameters' state tensors."""

    options: _core.UpdateOptions
    state: Sequence[str]


class _Plan(NamedTuple):
    """The prepared update for a round; `tensors` keeps the memory at `addresses` alive."""

    update: _core.Update
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]


class FusedUpdates:
    """Creates updates with which the core applies `optimizer` to a slice while its average is in the first-level cache.

    The core supports torch's Adam, AdamW and SGD with `fused=True`, whose rounding torch leaves to the implementation.
    Torch remains responsible for their state: it creates the state in the first step, and saves and loads it. The
    parameter groups of `optimizer`, which hold this rank's slices, must not change.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._group_of = {
            id(updated): index for index, group in enumerate(optimizer.param_groups) for updated in group["params"]
        }
        self._plans: weakref.WeakKeyDictionary[ReadyRound, _Plan] = weakref.WeakKeyDictionary()
        self._groups: list[_Group] = []  # empty if torch must perform this step

    def begin_step(self) -> None:
        """Reads the parameter groups' options for this step."""
        groups = [_options_of(self._optimizer, group) for group in self._optimizer.param_groups]
        self._groups = [group for group in groups if group is not None] if all(groups) else []

    def begin(self, ready: ReadyRound) -> _core.Update | None:
        """Returns the update for the core to apply in this round, or None if torch must apply it."""
        tensors = self._tensors(ready) if self._groups else None
        if not tensors:
            return None
        plan = self._plans.get(ready)
        if plan is None or plan.addresses != list(map(_address, tensors)):
            if not self._are_usable(ready):
                return None
            plan = self._plans[ready] = self._plan(ready, tensors)
        plan.update.begin([group.options for group in self._groups])
        return plan.update

    def _tensors(self, ready: ReadyRound) -> list[torch.Tensor] | None:
        """Returns the updated tensors, each followed by its state, or None if torch has not created all state yet."""
        tensors: list[torch.Tensor] = []
        for updated, _ in ready.averages:
            tensors.append(updated)
            names = self._groups[self._group_of[id(updated)]].state
            if names:
                state = self._optimizer.state.get(updated, {})
                tensors += [tensor for name in names if (tensor := state.get(name)) is not None]
                if not all(name in state for name in names):
                    return None
        return tensors

    def _are_usable(self, ready: ReadyRound) -> bool:
        """Returns True if the core supports the dtypes and layouts of this round's state."""
        for updated, _ in ready.averages:
            state = self._optimizer.state.get(updated, {})
            for name in self._groups[self._group_of[id(updated)]].state:
                tensor = state[name]
                is_usable = (
                    tensor.dtype is torch.float32
                    if name == "step"
                    else tensor.dtype is updated.dtype and tensor.stride() == updated.stride()
                )
                if not is_usable or not tensor.is_cpu:
                    return False
        return ready.sums.dtype in _DTYPES

    def _plan(self, ready: ReadyRound, tensors: Sequence[torch.Tensor]) -> _Plan:
        addresses = list(map(_address, tensors))
        runs, start = [], 0
        for updated, _ in ready.averages:
            group = self._group_of[id(updated)]
            width = 1 + len(self._groups[group].state)
            param, first, second, steps = (*addresses[start : start + width], 0, 0, 0)[:4]
            runs.append((param, first, second, steps, updated.nbytes, group))
            start += width
        return _Plan(_core.Update(DTYPE_CODES[ready.sums.dtype], runs), tensors, addresses)


def _options_of(optimizer: Optimizer, group: Mapping[str, Any]) -> _Group | None:
    """Converts a parameter group's options for the core; returns None if the core does not support them."""
    if not group.get("fused") or group.get("amsgrad"):
        return None
    lr, weight_decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group["maximize"])
    if type(optimizer) in (Adam, AdamW):
        beta1, beta2 = (float(beta) for beta in group["betas"])
        options = _core.adam_options(
            lr=lr,
            weight_decay=weight_decay,
            maximize=maximize,
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            is_decoupled=bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW)),
        )
        return _Group(options, ("exp_avg", "exp_avg_sq", "step"))
    if type(optimizer) is SGD:
        momentum = float(group["momentum"])
        options = _core.sgd_options(
            lr=lr,
            weight_decay=weight_decay,
            maximize=maximize,
            momentum=momentum,
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
        )
        return _Group(options, ("momentum_buffer",) if momentum else ())
    return None
