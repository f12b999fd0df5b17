"""Data-parallel training: each rank holds the model and computes on its part of the batch; gradients are averaged."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.errors import CollectiveError
from paceline.group.eager import Compiler, compiled_by, eager_around, own_code, set_eval_frame
from paceline.group.process_group import ProcessGroup
from paceline.group.wire import WireKind
from paceline.parallel.conditions import unsupported_reason
from paceline.parallel.data_parallel import apply_on_devices
from paceline.parallel.ddp.arguments import (
    DEFAULT_BUCKET_CAP_MB,
    choose_bucket_caps,
    choose_buffer_sync,
    choose_group,
    choose_reduce_dtype,
    require_whole_pairs,
)
from paceline.parallel.ddp.copying import CopyableModule
from paceline.parallel.ddp.delayed import DelayedParameters, require_delayed
from paceline.parallel.ddp.delegating import DelegatingModule
from paceline.parallel.ddp.error_text import add_context, sending_buffers_context
from paceline.parallel.ddp.feedback import choose_wire
from paceline.parallel.ddp.hook import CommHook, Hook
from paceline.parallel.ddp.join_hook import UnevenSteps
from paceline.parallel.ddp.reducer import Reducer
from paceline.parallel.ddp.start import start_alike
from paceline.parallel.ddp.watched import WatchedModule
from paceline.parallel.graph import is_traced, may_require_grad, untraced
from paceline.parallel.health.module_checks import ModuleChecks
from paceline.parallel.health.settings import choose_checks
from paceline.parallel.hooks.average import allreduce_hook, compress_wrapper
from paceline.parallel.join import Joinable
from paceline.parallel.scatter_gather import Device, to_device
from paceline.parallel.sharded.replica import ShardedReplica
from paceline.parallel.tracked_tensors import collect_tracked
from paceline.record.names import EventKind
from paceline.record.spans import Recorded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel.distributed import _MixedPrecision


class DistributedDataParallel(DelegatingModule, CopyableModule):
    """Wraps `module` so that its backward averages the gradients over the ranks.

    Args:
        module: a model on the CPU, or on GPUs if there is a backend for them, the same on every rank; rank 0's
            parameters and buffers are copied to all.
        device_ids: the device of the module, to which forward moves its inputs; a number stands for a GPU. With several
            devices, which may be the CPU several times, each has a replica and a part of the batch. If None, the module
            is called as it is, on whatever devices its layers are.
        output_device: the device on which the outputs of several devices are concatenated; the first one if None.
        dim: the dimension along which the batch is split between the devices.
        broadcast_buffers: the older name of `forward_sync_buffers`; with False, buffers are not copied when the module
            is wrapped either.
        init_sync: whether the models are compared and copied at the start; without it the ranks must hold the same one
            already.
        process_group: the ranks that take part; the default group if None.
        bucket_cap_mb: the MiB of gradients that are reduced together; 25 if None.
        find_unused_parameters: whether parameters may get no gradient. A gradient that no rank has stays None; one that
            only other ranks have is zero on this rank. Nothing is reduced before backward ends.
        check_reduction: has no effect, as in torch.
        gradient_as_bucket_view: has no effect, since gradients are reduced where they are, without copies for buckets.
        static_graph: whether all backwards are alike: the first one shows which parameters get no gradient, and which
            get several.
        delay_all_reduce_named_params: pairs of a name and a parameter, whose gradients are averaged apart from all
            others, also within `no_sync`, at the end of each backward that reaches `param_to_hook_all_reduce`.
        param_to_hook_all_reduce: a parameter that is trained.
        mixed_precision: torch's `_MixedPrecision`. Gradients are averaged in its `reduce_dtype`; it may not cast
            parameters or buffers, for which there is `torch.autocast`.
        device_mesh: a mesh of one dimension with all ranks, which stands for the default group.
        skip_all_reduce_unused_params: has no effect, since a gradient that no rank has is never reduced.
        bucket_cap_mb_list: the MiB of the first bucket, the second, and so on; the last number is for all others.
        batched_grad_copy: has no effect, since there are no copies for buckets.
        forward_sync_buffers: whether rank 0's buffers are copied to all ranks before each forward in training mode, and
            at the end of `join`; True if None.
        lazy_bucket_allocation: has no effect, since there is no memory for buckets.
        deterministic: whether training ends with the same bits on any number of ranks that is a power of two (see
            docs/reproducible.md).
        logical_shards: with `deterministic`, a power of two that is at least the number of ranks. A step's samples are
            divided among that many shards, each of which is computed alone. Runs with the same number end with the same
            bits.
        seed: with `deterministic`, the seed of the shards' random numbers.
        overlap: whether gradients are reduced while backward computes others. If None, they are where each rank of this
            host has a core to spare (see docs/data-parallel.md), and always on GPUs.
        checks: whether a warning is given when gradients are not finite or replicas differ (see docs/data-parallel.md);
            a number says how many steps pass between comparisons of the replicas. If None, PACELINE_CHECKS says so.
        wire: "bf16", "int8" or "int4" to have gradients rounded on their way between hosts, with error feedback (see
            docs/slow-networks.md); the group's if None.

    Raises:
        CollectiveMismatchError: the models, or these arguments, differ between ranks; raised on every rank.
        ValueError: a parameter is on a device for which the group has no engine, or not on the first of `device_ids`;
            `device_ids` or `output_device` names a GPU that does not exist; or arguments contradict each other.
        RuntimeError: no parameter requires a gradient.
        TypeError: the module has parameters of a dtype that cannot be averaged, or `process_group` is not a group of
            Paceline's.

    The attribute `module` is the wrapped model. `state_dict` has the model's keys with the prefix "module.".

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
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.device_ids = [to_device(device) for device in device_ids or ()]
        self.output_device = self.device_ids[0] if self.device_ids else torch.device("cpu")
        if output_device is not None:
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
        self._delay_trigger = (param_to_hook_all_reduce,)  # in a tuple, or it would be a parameter of the wrapper
        self.require_backward_grad_sync = True
        self.overlap = self.asks_for_overlap = bool(overlap)
        self.checks = choose_checks(checks)
        tracked = collect_tracked(module, [name for name, _ in self._delayed_pairs])
        if not (init_sync_buffers or self.forward_sync_buffers):
            tracked = replace(tracked, buffers={})  # they are each rank's own, of whatever kind
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
            self.overlap = start_alike(tracked, compared, overlap, problem, self.process_group, init_sync_buffers)
        elif problem is not None:
            raise problem
        self._start()
        if self._delayed is not None:
            self._delayed.broadcast()

    @eager_around
    def forward(self, *args: object, **kwargs: object) -> object:
        """Calls the module; the backward of what it returns averages the gradients (see `no_sync`).

        Inside a backward, where `torch.utils.checkpoint` calls a module again, no buffers are copied; the gradients are
        averaged by that backward.

        Raises:
            RuntimeError: the last backward left gradients that were not averaged, or a module with `deterministic` is
                called inside a backward.
        """
        # What surrounds the module is no part of what torch.compile compiles.
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
        """Does what comes before a forward whose backward averages."""
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
        with Recorded(EventKind.FORWARD, "ddp"):
            if not self.device_ids:
                return called(*args, **kwargs)
            return apply_on_devices(self.module, self.device_ids, self.output_device, self.dim, args, kwargs, called)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which the backwards of forwards accumulate gradients without averaging them.

        The backward of the first forward after the context averages what was accumulated.
        """
        self._require_not_elastic("no_sync", "without it, gradients accumulate too, and are averaged in each backward")
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Makes `hook(state, bucket)` average the gradients, a bucket at a time, instead of the engine.

        `bucket` is a `GradBucket`; the hook returns a `torch.futures.Future` of the averaged flat buffer, or the `Work`
        of a collective on it that was called with `async_op=True`. Every rank must register the same hook. Hooks that
        compress gradients are in `paceline.parallel.hooks`. A second backward of one forward passes gradients that were
        averaged to the hook again.

        Raises:
            TypeError: `hook` is not callable.
            RuntimeError: the module has a hook already.
            ValueError: the module is `deterministic`, or has a `wire`.
        """
        self._require_not_deterministic("register_comm_hook")
        self._require_not_elastic("register_comm_hook", "gradients are averaged as they are")
        if not callable(hook):
            raise TypeError(
                f"the communication hook is a {type(hook).__name__}; it must be callable as hook(state, bucket)"
            )
        if self.wire is not None:
            raise ValueError(f"register_comm_hook was called on a module with wire={self.wire!r}; use one of the two")
        if self._reducer.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook was called twice on this module; wrap the module again to give it another hook"
            )
        self._reducer.comm_hook = CommHook(state, hook)
        if self.checks.every is None and not (getattr(hook, "__module__", None) or "").startswith("paceline."):
            self._checks.allow_differences()  # the hook may average over some of the ranks only

    def communication_wait_s(self) -> float:
        """Returns the seconds that backwards have spent at their ends on reducing gradients and waiting for that."""
        return self._reducer.wait_s

    def _start(self) -> None:
        self._call_module = own_code(_call_module)
        self._watched = WatchedModule(
            self.module,
            self.process_group,
            [name for name, _ in self._delayed_pairs],
            may_leave_out=self.find_unused_parameters,
        )
        self._steps = UnevenSteps(self.process_group)
        tracked, exact = self._watched.tracked, self.logical_shards is not None
        self._checks = ModuleChecks(self.module, tracked, self.process_group, self.checks, with_buffers=exact)
        self._reducer = Reducer(
            tracked,
            self._bucket_caps,
            self.process_group,
            name=type(self.module).__name__,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            overlap=self.overlap,
            checks=self._checks,
            wire=self.wire,
        )
        # The hooks must not outlive the wrapper: the module may be wrapped again.
        weakref.finalize(self, self._reducer.close).atexit = False
        if self._reduce_dtype is not None:
            self._reducer.comm_hook = CommHook(self.process_group, compress_wrapper(self._reduce_dtype, allreduce_hook))
        self._delayed: DelayedParameters | None = None
        (trigger,) = self._delay_trigger
        if trigger is not None:
            self._delayed = DelayedParameters(self.module, self._delayed_pairs, trigger, self.process_group)
            weakref.finalize(self, self._delayed.close).atexit = False
        self._replica = None
        if self.logical_shards is not None:
            torch.set_num_threads(1)  # how kernels split sums depends on it
            self._replica = ShardedReplica(
                self.module, tracked, self.logical_shards, self.seed, self.dim, self.process_group, self._checks
            )


def _call_module(module: nn.Module, *args: object, **kwargs: object) -> object:
    """Calls the module in a frame that torch.compile compiles, which it does not do with frames of PyTorch's layers."""
    return module(*args, **kwargs)


DistributedDataParallelCPU = DistributedDataParallel
