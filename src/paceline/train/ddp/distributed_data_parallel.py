"""DistributedDataParallel: each rank holds the whole model and a part of the batch, and backward averages gradients.

The class provides undocumented attributes of torch's DistributedDataParallel that programs rely on, and methods for
elastic jobs (`average_by`, `weight`, `skip_batch`). `DdpJoinHook` runs the module's collectives on a rank that has run
out of inputs within `Join`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.comm.group.compression import WireKind
from paceline.comm.group.default import default_group
from paceline.comm.group.eager import Compiler, compiled_by, eager_around, own_code, set_eval_frame
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import RecordedSpan
from paceline.errors import CollectiveError
from paceline.train.autograd_graph import is_traced, may_require_grad, untraced
from paceline.train.checks.check_settings import choose_checks
from paceline.train.checks.module_checks import ModuleChecks
from paceline.train.data_parallel import Device, apply_on_devices, to_device
from paceline.train.ddp.arguments import (
    DEFAULT_BUCKET_CAP_MB,
    choose_bucket_caps,
    choose_buffer_sync,
    choose_group,
    choose_reduce_dtype,
    choose_wire,
    require_delayed,
    require_hook,
    require_whole_pairs,
)
from paceline.train.ddp.comm_hook import CommHook, Hook
from paceline.train.ddp.error_text import add_context, sending_buffers_context
from paceline.train.ddp.gradient_averager import (
    DelayedParameters,
    DelegatingAverager,
    ExternalAverager,
    GradientAverager,
)
from paceline.train.ddp.hooks import allreduce_hook, compress_wrapper
from paceline.train.ddp.module_monitor import ModuleMonitor
from paceline.train.ddp.reducer import Reducer
from paceline.train.join import Join, Joinable, JoinHook
from paceline.train.logical_shards.sharded_replica import ShardedReplica
from paceline.train.module_tensors import (
    TrackedTensors,
    broadcast_tensors,
    collect_tracked,
    ignore_tensors,
    mark_synchronized,
    unmark_synchronized,
)
from paceline.train.preconditions import (
    rank_facts,
    reduces_during_backward,
    require_module,
    require_same_module,
    unsupported_reason,
    warn_of_too_many_threads,
    warn_of_torchs_sync_batch_norm,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel.distributed import _MixedPrecision

_OF_THIS_PROCESS = (
    "process_group",
    "_averager",
    "_reducer",
    "_replica",
    "_watched",
    "_delayed",
    "_averages",
    "_checks",
    "_call_module",
)

_INSIDES = {
    "reducer": "no torch Reducer exists; use no_sync(), register_comm_hook() or static_graph=True",
    "logger": "no torch Logger exists; use _get_ddp_logging_data() or communication_wait_s()",
}


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps `module` and averages its gradients over the ranks during backward.

    Args:
        module: the model, on the CPU or on GPUs for which the group has a backend. It must be the same on every rank.
            Rank 0's parameters and buffers are copied to all ranks.
        device_ids: the module's device, to which forward moves its inputs; an integer is a GPU index. With several
            devices, each device processes a part of the batch with its own replica; the CPU may be listed several
            times. If None, inputs are passed to the module unchanged, and the module's layers can be on any devices.
        output_device: the device on which the outputs of several devices are concatenated; if None, the first device.
            As in torch, 0 has no effect if `device_ids` is empty or None, for example if the module is on the CPU.
        dim: the dimension along which the batch is split between the devices.
        broadcast_buffers: the older name of `forward_sync_buffers`. False additionally disables copying buffers when
            the module is wrapped.
        init_sync: whether wrapping compares the models across ranks and copies rank 0's model to all ranks. If False,
            the models must already be equal.
        process_group: the process group of the ranks; if None, the default group.
        bucket_cap_mb: the maximum size of a gradient bucket in MiB; if None, 25. With 0, each gradient has its own
            bucket.
        find_unused_parameters: whether a backward pass may leave some parameters without a gradient. A gradient that no
            rank has computed stays None. If only other ranks have computed a gradient, this rank contributes zeros.
            Reduction starts when backward ends.
        check_reduction: has no effect, as in torch.
        gradient_as_bucket_view: has no effect. On the CPU, gradients are reduced in place, without copies into buckets.
            On other devices, gradients are views of the buckets after each backward pass.
        static_graph: whether the autograd graph is the same in every step. The first backward pass determines which
            parameters receive no gradient, and which receive several.
        delay_all_reduce_named_params: pairs of a name and a parameter whose gradient is averaged separately, even
            within `no_sync`, at the end of each backward pass that reaches `param_to_hook_all_reduce`.
        param_to_hook_all_reduce: the parameter whose gradient triggers the averaging of
            `delay_all_reduce_named_params`; it must require a gradient.
        mixed_precision: torch's `_MixedPrecision`. Gradients are averaged in its `reduce_dtype`; it must not cast
            parameters or buffers (use `torch.autocast`).
        device_mesh: a one-dimensional mesh of all ranks, which selects the default group.
        skip_all_reduce_unused_params: has no effect. A gradient that no rank has computed is never reduced.
        bucket_cap_mb_list: the maximum sizes of the buckets in MiB, in order; the last entry applies to all remaining
            buckets.
        batched_grad_copy: has no effect. On accelerators, the gradients of a bucket are always copied together.
        forward_sync_buffers: whether rank 0's buffers are copied to all ranks before each forward pass in training mode
            and at the end of `join`. None means True.
        lazy_bucket_allocation: has no effect. On the CPU, buckets need no extra memory; on other devices, the first
            backward pass allocates it.
        deterministic: whether training results are bitwise equal on any number of ranks that is a power of two (see
            docs/reproducible.md).
        logical_shards: with `deterministic`, the number of shards into which each step's samples are divided; a power
            of two, at least the number of ranks. Each shard is computed separately. Runs with the same number of shards
            produce bitwise equal results.
        seed: with `deterministic`, the seed for the shards' random numbers.
        overlap: whether gradients are reduced while backward is still computing other gradients. If None, reduction
            overlaps on GPUs, and on the CPU if every rank has a spare core (see docs/data-parallel.md).
        checks: whether to warn about non-finite gradients and differing replicas (see docs/data-parallel.md). An
            integer is the number of steps between two comparisons of the replicas. If None, the environment variable
            PACELINE_CHECKS applies.
        wire: the format to which gradients are rounded between hosts, with error feedback: "bf16", "int8" or "int4"
            (see docs/slow-networks.md). If None, the group's wire is used.

    Raises:
        CollectiveMismatchError: the models, or these arguments, differ between ranks; raised on every rank.
        ValueError: a parameter is on a device for which the group has no engine, or is not on the first device in
            `device_ids`; a GPU in `device_ids` or `output_device` does not exist; or arguments conflict with each
            other.
        RuntimeError: no parameter requires a gradient.
        TypeError: the module has parameters of a dtype that cannot be averaged, or `process_group` is not a Paceline
            group.

    The attribute `module` is the wrapped model. The keys of `state_dict` are the model's, with the prefix "module.".

    Example::

        model = paceline.DistributedDataParallel(model)
        loss_function(model(inputs), targets).backward()  # the same gradients on every rank
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: _MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        deterministic: bool = False,
        logical_shards: int | None = None,
        seed: int = 0,
        overlap: bool | None = None,
        checks: bool | int | None = None,
        wire: WireKind | None = None,
    ) -> None:
        require_module(module, "DistributedDataParallel")
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.device_ids = [to_device(device) for device in device_ids or ()]
        self.output_device = self.device_ids[0] if self.device_ids else torch.device("cpu")
        # torch ignores the index 0 without device_ids, so programs pass it for modules on the CPU too
        if output_device is not None and (self.device_ids or output_device != 0):
            self.output_device = to_device(output_device)
        self.dim = dim
        require_whole_pairs(
            deterministic, logical_shards, device_ids, delay_all_reduce_named_params, param_to_hook_all_reduce
        )
        self.logical_shards = logical_shards
        self.seed = seed
        self.module = module
        self.process_group = choose_group(process_group, device_mesh)
        init_sync_buffers, self.forward_sync_buffers = choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self._reduce_dtype = choose_reduce_dtype(mixed_precision)
        self.bucket_cap_mb = DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        self._bucket_caps = choose_bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self._delayed_pairs = require_delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        # a tuple, because torch does not register parameters in tuples
        self._delay_trigger = (param_to_hook_all_reduce,)
        self.require_backward_grad_sync = True
        self._divides_by_initial_world_size = True  # within `Join`
        self.overlap = self._is_overlap_requested = bool(overlap)
        self.checks = choose_checks(checks)
        tracked = collect_tracked(module, [name for name, _ in self._delayed_pairs])
        if not (init_sync_buffers or self.forward_sync_buffers):
            tracked = replace(tracked, buffers={})  # buffers may differ between ranks, even in dtype and shape
        has_delayed = bool(self._delayed_pairs)
        problem = unsupported_reason(tracked, self.process_group, self.device_ids, self.output_device, has_delayed)
        excluded = {"deterministic=True": deterministic, "mixed_precision": self._reduce_dtype is not None}
        self.wire, unfit = choose_wire(wire, self.process_group, excluded, tracked.trained)
        problem = problem or unfit
        if init_sync:
            compared: dict[str, object] = {
                "forward_sync_buffers": self.forward_sync_buffers,
                "bucket_cap_mb": self.bucket_cap_mb,
                "bucket_cap_mb_list": None if bucket_cap_mb_list is None else list(bucket_cap_mb_list),
                "find_unused_parameters": find_unused_parameters,
                "static_graph": static_graph,
                "delay_all_reduce_named_params": [name for name, _ in self._delayed_pairs],
                "mixed_precision": str(mixed_precision),
                "logical_shards": logical_shards,
                "seed": seed,
                "overlap": overlap,
                "checks": str(self.checks),
                "wire": self.wire,
            }
            self.overlap = synchronize_replicas(
                tracked, compared, overlap, problem, self.process_group, init_sync_buffers
            )
            mark_synchronized(self)
        elif problem is not None:
            raise problem
        warn_of_torchs_sync_batch_norm(module, self.process_group)
        self._start()
        if self._delayed is not None:
            self._delayed.broadcast()

    def _start(self) -> None:
        """Creates the per-process objects that `__getstate__` omits; called for new, copied and unpickled modules."""
        self._averages: ExternalAverager | None = None
        self._call_module = own_code(_call_module)
        self._watched = ModuleMonitor(
            self.module,
            self.process_group,
            [name for name, _ in self._delayed_pairs],
            may_leave_out=self.find_unused_parameters,
        )
        tracked, exact = self._watched.tracked, self.logical_shards is not None
        self._checks = ModuleChecks(self.module, tracked, self.process_group, self.checks, with_buffers=exact)
        self._averager = GradientAverager(
            tracked,
            self._bucket_caps,
            self.process_group,
            checks=self._checks,
            overlap=self.overlap,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            wire=self.wire,
        )
        if self._reduce_dtype is not None:
            hook = compress_wrapper(self._reduce_dtype, allreduce_hook)
            self._averager.comm_hook = CommHook(self.process_group, hook, sets_divisor=False)
        self._reduce_with(self._averager)
        self._delayed: DelayedParameters | None = None
        (trigger,) = self._delay_trigger
        if trigger is not None:
            self._delayed = DelayedParameters(self.module, self._delayed_pairs, trigger, self.process_group)
            weakref.finalize(self, self._delayed.close).atexit = False
        self._replica = None
        if self.logical_shards is not None:
            torch.set_num_threads(1)  # the rounding of sums depends on the number of threads
            self._replica = ShardedReplica(
                self.module, tracked, self.logical_shards, self.seed, self.dim, self.process_group, self._checks
            )

    def _reduce_with(self, averager: GradientAverager) -> None:
        self._averager, self._reducer = averager, Reducer(averager, type(self.module).__name__)
        # The reducer's hooks must not outlive the wrapper, because the module may be wrapped again.
        weakref.finalize(self, self._reducer.close).atexit = False

    @eager_around
    def forward(self, *args: object, **kwargs: object) -> object:
        """Calls the module. Except within `no_sync`, a backward pass through its outputs averages the gradients.

        If `torch.utils.checkpoint` calls the module again inside a backward pass, no buffers are copied, and the
        running backward pass averages the gradients.

        Raises:
            RuntimeError: the latest backward pass left gradients that were not averaged, or a deterministic module was
                called inside a backward pass.
        """
        # torch.compile must compile the wrapped module, but not the wrapper's code.
        compiler = set_eval_frame(None)
        try:
            return self._forward(args, kwargs, compiler)
        finally:
            set_eval_frame(compiler)

    def _forward(self, args: Sequence[object], kwargs: Mapping[str, object], compiler: Compiler) -> object:
        records = torch.is_grad_enabled()
        if records and not self._reducer.is_recomputing():
            self._reducer.recorded.forward_begins()
        if self._replica is not None and records:
            self._watched.check_unchanged()
            return self._replica(args, kwargs, self.require_backward_grad_sync, compiler)
        if records and self._reducer.is_recomputing():
            output = self._call(args, kwargs, compiler)
            self._reducer.follow(output)
            return output
        self._checks.is_uneven = self._join_config.enable
        root = self._announce_step() if self._join_config.enable and records else 0
        if not (self.require_backward_grad_sync and records):
            output = self._call(args, kwargs, compiler)
            if records:
                self._reducer.leave_out(output)
            return output
        if is_traced():
            with untraced():
                self._prepare(args, kwargs, root)
        else:
            self._prepare(args, kwargs, root)
        output = self._call(args, kwargs, compiler)
        self._reducer.expect(output, may_require_grad((args, kwargs)))
        return output

    def _prepare(self, args: Sequence[object], kwargs: Mapping[str, object], root: int) -> None:
        """Prepares a forward pass whose backward pass will average gradients: checks the module and copies buffers."""
        self._reducer.before_forward((args, kwargs))
        self._watched.check_unchanged()
        if self.forward_sync_buffers and self.training and self._averages is None:
            self._send_buffers(root)

    def _send_buffers(self, root: int) -> None:
        try:
            self._watched.send_buffers(root)
        except CollectiveError as error:
            reducer = self._reducer
            name = type(self.module).__name__
            add_context(error, sending_buffers_context(name, reducer.forwards + 1, reducer.awaits_backward()))
            raise

    def _call(self, args: Sequence[object], kwargs: Mapping[str, object], compiler: Compiler) -> object:
        def call(*args: object, **kwargs: object) -> object:
            return compiled_by(compiler, self._call_module, self.module, *args, **kwargs)

        called = self.module if compiler is None else call
        with RecordedSpan(EventKind.FORWARD, "ddp"):
            if not self.device_ids:
                return called(*args, **kwargs)
            return apply_on_devices(self.module, self.device_ids, self.output_device, self.dim, args, kwargs, called)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context that disables averaging: gradients from forward passes inside it only accumulate.

        The accumulated gradients are averaged in the backward pass of the first forward pass outside the context.
        """
        self._require_not_elastic("no_sync", "without it, gradients accumulate too, and are averaged in each backward")
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Registers a hook that replaces the engine's averaging of each gradient bucket.

        The hook is called as `hook(state, bucket)` with a `GradBucket`. It returns a `torch.futures.Future` for the
        averaged flat buffer, or the `Work` from a collective that was called on this buffer with `async_op=True`. Every
        rank must register the same hook. `paceline.parallel.hooks` provides hooks that compress gradients. In a second
        backward pass through the same forward pass, the hook receives gradients that include the averages from the
        first one.

        Raises:
            TypeError: `hook` is not callable.
            RuntimeError: the module already has a hook, or belongs to an ElasticState.
            ValueError: the module was wrapped with `deterministic` or with a `wire`; or an annotation of the hook is a
                class other than a bucket or a future, as in torch.
        """
        self._require_not_deterministic("register_comm_hook")
        self._require_not_elastic("register_comm_hook", "gradients are averaged as they are")
        require_hook(hook)
        if self.wire is not None:
            raise ValueError(f"register_comm_hook was called on a module with wire={self.wire!r}; use one of the two")
        if self._averager.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook was called twice on this module; wrap the module again to give it another hook"
            )
        self._averager.comm_hook = CommHook(state, hook)
        unmark_synchronized(self)
        if self.checks.every is None and not (getattr(hook, "__module__", None) or "").startswith("paceline."):
            self._checks.allow_differences()  # the hook may average over a subset of the ranks

    def communication_wait_s(self) -> float:
        """Returns the total time, in seconds, spent averaging and waiting for other ranks after backward passes."""
        return self._reducer.wait_s

    def weight(self, weight: float) -> None:
        """Sets the weight of this rank's next backward pass in the mean over the ranks; the default is 1.

        This module must belong to a `paceline.ElasticState`. For example, if each rank's loss is the mean over its
        tokens, and its weight is the number of these tokens, the averaged gradients are those of the mean loss over all
        ranks' tokens. If all weights are zero, the gradients keep their values from before the forward pass.

        Args:
            weight: the weight, which must not be negative.

        Raises:
            RuntimeError: this module does not belong to an ElasticState.
            ValueError: the weight is negative, infinite or NaN.
        """
        if self._averages is None:
            raise RuntimeError(
                f"rank {self.process_group.me.rank}: weight({weight}) was called on a DistributedDataParallel that no "
                "ElasticState holds; only elastic jobs weight their ranks, others multiply the loss by the weight over "
                "the mean weight"
            )
        self._averages.set_weight(weight)

    def average_by(self, averages: ExternalAverager) -> tuple[list[nn.Parameter], Callable[[], list[torch.Tensor]]]:
        """Delegates the averaging of gradients and the copying of buffers to an elastic job.

        Returns:
            The parameters whose gradients are averaged, and a function that returns the buffers to be copied.

        Raises:
            ValueError: the module was wrapped with an option that requires a fixed set of ranks.
        """
        self._require_delegable()
        self._reducer.close()
        averager = DelegatingAverager(
            self._watched.tracked,
            self._bucket_caps,
            self.process_group,
            averages,
            checks=self._checks,
            find_unused=self.find_unused_parameters or self.static_graph,
        )
        self._averages = averages
        self._reduce_with(averager)
        return averager.gradients.params, self._watched.current_buffers if self.forward_sync_buffers else list

    def skip_batch(self) -> None:
        """Participates in the other ranks' average without a backward pass; see `ElasticState.skip_batch`."""
        assert self._averages is not None
        self._reducer.skip(self._averages.skip)

    def require_averaged(self) -> None:
        """Checks that the gradients from the latest backward pass were averaged.

        Raises:
            RuntimeError: the gradients were not averaged, because some parameters have no gradient.
        """
        self._reducer.require_averaged()

    def _require_delegable(self) -> None:
        tracked = self._watched.tracked
        refused = {
            "deterministic=True; use LogicalShards": self._replica is not None,
            "delay_all_reduce_named_params": self._delayed is not None,
            "a communication hook, or a reduce_dtype": self._averager.comm_hook is not None,
            "overlap=True; in an elastic job gradients are averaged when backward ends": self._is_overlap_requested,
            "process_group; leave it out, because an elastic job has no other group": self.process_group.size() != 1,
            "wire; elastic jobs average gradients exactly": self.wire is not None,
            "sparse gradients; use sparse=False": bool(tracked.sparse),
            "SyncBatchNorm, whose forward needs all ranks": any(
                isinstance(layer, nn.SyncBatchNorm) or type(layer).__name__ == "SyncBatchNorm"
                for layer in self.module.modules()
            ),
        }
        if found := [option for option, is_used in refused.items() if is_used]:
            raise ValueError(
                f"ElasticState got a DistributedDataParallel with {found[0]}: this requires a fixed set of ranks, but "
                "the ranks of an elastic job change"
            )

    def _require_not_elastic(self, call: str, instead: str) -> None:
        if self._averages is not None:
            raise RuntimeError(
                f"{call} was called on a DistributedDataParallel that an ElasticState holds, whose ranks change; "
                f"{instead}"
            )

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Returns a context in which ranks may run out of inputs at different times.

        A rank that has run out contributes zeros to the other ranks' steps. At the end, all ranks receive the
        parameters and buffers of one of the ranks that trained longest. Every step must consist of one forward pass and
        one backward pass.

        Args:
            divide_by_initial_world_size: whether gradients are divided by the total number of ranks, which weights all
                inputs equally. If False, they are divided by the number of ranks that still have inputs. It has no
                effect on a registered communication hook, which determines its own divisor, as in torch.
            enable: whether the context has any effect.
            throw_on_early_termination: whether all ranks raise an error as soon as one rank has run out.

        Example::

            with model.join():
                for inputs, targets in loader:  # its length differs between ranks
                    loss_function(model(inputs), targets).backward()
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Returns the module's hook for `Join`; accepts the keyword argument `divide_by_initial_world_size`.

        Raises:
            ValueError: the module was wrapped with `deterministic`, which divides every step evenly among all ranks, or
                with `delay_all_reduce_named_params`, which a rank without inputs cannot average.
            RuntimeError: the module belongs to an ElasticState.
        """
        self._require_not_elastic("Join", "its StatefulLoader gives every rank a batch in every step")
        self._require_not_deterministic("Join")
        if self._delayed is not None:
            raise ValueError(
                "Join got a module that was wrapped with delay_all_reduce_named_params; wrap it without, or give all "
                "ranks the same number of inputs"
            )
        self._divides_by_initial_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        return DdpJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """Returns the device of the parameters."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Returns the process group that averages the gradients."""
        return self.process_group

    def _announce_step(self) -> int:
        """Announces a step to all ranks within `Join`, and returns the rank whose buffers are copied."""
        Join.notify_join_context(self)
        step = self._exchange_step(True, self.require_backward_grad_sync, self.will_sync_module_buffers())
        return step.sends_buffers.index(True) if any(step.sends_buffers) else 0

    def _exchange_step(self, is_active: bool, averages: bool = False, sends_buffers: bool = False) -> _Step:
        """Gathers a step's flags from all ranks within `Join`, and sets the divisor for the gradients.

        Every step starts with this call: in forward on ranks with inputs, in `DdpJoinHook.main_hook` on other ranks.
        """
        own = torch.tensor([is_active, averages, sends_buffers], device="cpu")
        everyones = [torch.empty_like(own) for _ in range(self.process_group.size())]
        self.process_group.all_gather(everyones, own)
        step = _Step(*torch.stack(everyones, 1).tolist())
        if any(step.is_active):
            active = self.process_group.size() if self._divides_by_initial_world_size else sum(step.is_active)
            self._averager.scale = self.process_group.size() / active
        return step

    def _require_not_deterministic(self, call: str) -> None:
        if self._replica is not None:
            raise ValueError(
                f"{call} got a module with deterministic=True, whose gradients are added in a fixed order; "
                "wrap it without deterministic"
            )

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name in _INSIDES:
            raise AttributeError(f"paceline.DistributedDataParallel has no attribute {name!r}: {_INSIDES[name]}")
        return super().__getattr__(name)

    @property
    def broadcast_buffers(self) -> bool:
        """Returns `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Returns True if the next forward pass can copy buffers; False within `no_sync`."""
        return self.require_backward_grad_sync

    @property
    def device(self) -> torch.device:
        """Returns the device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """Returns the type of `device`, such as "cpu"."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Returns True if the module's parameters are on several devices."""
        return len({param.device for param in self.module.parameters()}) > 1

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Returns the names of the parameters and buffers that are neither copied nor averaged."""
        return set(self._watched.tracked.ignored)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the module's buffers by name, excluding ignored buffers."""
        ignored = self._watched.tracked.ignored
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in ignored}

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """Returns the values of `named_module_buffers`."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Returns True if a forward pass now would copy buffers; False in evaluation mode and within `no_sync`."""
        syncs = self.require_backward_grad_sync and self.forward_sync_buffers and self.training
        return syncs and bool(self._watched.current_buffers())

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Returns the fields of torch's DDP logging data that apply to this class."""
        params = self._watched.tracked.trained.values()
        hook = self._averager.comm_hook
        return {
            "module_name": type(self.module).__name__,
            "backend_name": self.process_group.backend,
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "iteration": self._reducer.forwards,
            "bucket_sizes": ", ".join(str(bucket.nbytes) for bucket in self._averager.gradients.buckets),
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": sum(param.nbytes for param in params),
            "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params})),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "comm_hook": "" if hook is None else hook.name,
        }

    def _set_static_graph(self) -> None:
        """Enables `static_graph` after wrapping; must be called before the first forward pass.

        Raises:
            RuntimeError: forward has already been called.
        """
        if self.static_graph:
            return
        if self._reducer.forwards:
            raise RuntimeError(
                "_set_static_graph was called after a forward, whose backward expects that the graph may change; call "
                "it before the first forward, or wrap the module with static_graph=True"
            )
        self.static_graph = True
        self._reducer.make_static()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Prevents future wrappers of `module` from averaging or copying the named tensors."""
        ignore_tensors(module, params_and_buffers_to_ignore)

    # - Copies: a deep copy keeps the process group; an unpickled module uses the default group of its new process

    def __getstate__(self) -> dict[str, object]:
        state: Callable[[], dict[str, object]] = super().__getstate__  # omits the result of `compile()`
        return {name: value for name, value in state().items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.process_group = default_group()
        self._start()

    def __deepcopy__(self, memo: dict[int, object]) -> DistributedDataParallel:
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        copied.process_group = self.process_group
        copied._start()
        return copied


DistributedDataParallelCPU = DistributedDataParallel


@dataclass(frozen=True)
class _Step:
    """Per-rank flags for a step: whether the rank has inputs, averages gradients, and sends buffers before forward."""

    is_active: list[bool]
    averages: list[bool]
    sends_buffers: list[bool]


class DdpJoinHook(JoinHook):
    """Runs the collectives of a module's forward and backward passes on a rank that has run out of inputs."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._own_gradients: list[torch.Tensor | None] | None = None

    def main_hook(self) -> None:
        """Contributes zeros to a step and receives the average, so that this rank's optimizer can step."""
        step = self._model._exchange_step(is_active=False)
        if not any(step.averages):
            return
        if any(step.sends_buffers):
            self._model._watched.send_buffers(step.sends_buffers.index(True))
        before = self._model._reducer.contribute_zeros()
        if self._own_gradients is None:
            self._own_gradients = before

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies the model from a rank that trained longest; restores the gradients of this rank's own latest step."""
        model = self._model
        root = model._exchange_step(is_active=is_last_joiner).is_active.index(True)
        tensors = model._watched.current_tensors(with_buffers=model.forward_sync_buffers)
        broadcast_tensors(tensors, model.process_group, root)
        model._averager.scale = 1.0
        if self._own_gradients is not None:
            model._averager.gradients.set_values(self._own_gradients)


def synchronize_replicas(
    tracked: TrackedTensors,
    compared: dict[str, object],
    overlap: bool | None,
    problem: Exception | None,
    group: ProcessGroup,
    with_buffers: bool,
) -> bool:
    """Compares modules and the arguments in `compared` across ranks, and copies rank 0's tensors to all ranks.

    Every rank raises an error if any rank reports a `problem`. Otherwise, returns whether gradients are reduced during
    backward, which is the same on all ranks. If `overlap` is None, it depends on the number of cores.
    """
    facts = rank_facts(group, overlap, on_cpu=any(tensor.is_cpu for tensor in tracked.trained.values()))
    everyones = require_same_module(tracked, compared, facts, problem, group)
    warn_of_too_many_threads(everyones, group)
    # Writes through `data` do not increment the version counter. SharedModelOptimizer would mistake an increment for a
    # write by a single rank to the shared parameters. No backward pass needs the increment yet.
    broadcast_tensors([tensor.data for tensor in tracked.tensors(with_buffers)], group)
    return reduces_during_backward(everyones)


def _call_module(module: nn.Module, *args: object, **kwargs: object) -> object:
    """Calls the module from a separate frame, because torch.compile skips frames inside PyTorch's layers."""
    return module(*args, **kwargs)
