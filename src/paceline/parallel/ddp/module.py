"""Data parallel training: every rank holds the model, computes on its part of the batch, and averages gradients."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.errors import CollectiveError
from paceline.group.default import default_group
from paceline.group.process_group import ProcessGroup
from paceline.parallel.agreement import require_same_module
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.conditions import rank_facts, unsupported_reason, warn_of_too_many_threads
from paceline.parallel.data_parallel import apply_on_devices
from paceline.parallel.ddp.arguments import (
    DEFAULT_BUCKET_CAP_MB,
    choose_bucket_caps,
    choose_buffer_sync,
    choose_group,
    choose_reduce_dtype,
    require_whole_pairs,
)
from paceline.parallel.ddp.delayed import DelayedParameters, require_delayed
from paceline.parallel.ddp.error_text import add_context, sending_buffers_context
from paceline.parallel.ddp.hook import CommHook, Hook
from paceline.parallel.ddp.join_hook import DdpJoinHook, UnevenSteps
from paceline.parallel.ddp.reducer import Reducer
from paceline.parallel.ddp.torch_names import TorchNames
from paceline.parallel.ddp.watched import WatchedModule
from paceline.parallel.graph import find_tensors
from paceline.parallel.hooks.average import allreduce_hook, compress_wrapper
from paceline.parallel.join import Join, Joinable, JoinHook
from paceline.parallel.scatter_gather import Device, to_device
from paceline.parallel.sharded.replica import ShardedReplica
from paceline.parallel.tracked_tensors import collect_tracked

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel.distributed import _MixedPrecision

_OF_THIS_PROCESS = ("process_group", "_reducer", "_replica", "_watched", "_delayed", "_steps")


class DistributedDataParallel(TorchNames, Joinable):
    """Wraps `module` so that backward averages its gradients over the ranks.

    Args:
        module: a model on CPU, or on GPUs with a backend for them, the same on every rank; rank 0's parameters and
            buffers are copied to all.
        device_ids: the device of the module, to which forward moves its inputs; a number is a GPU's. With several of
            them, which may be the CPU several times, each has a replica and a part of the batch. None: the module is
            called as it is, on whatever devices its layers are.
        output_device: where the outputs of several devices are concatenated; the first one if None.
        dim: the dimension along which the batch is split between them.
        broadcast_buffers: the older name of `forward_sync_buffers`; False also leaves buffers as they are when the
            module is wrapped.
        init_sync: compare and copy the model at the start; without it the ranks must hold the same one already.
        process_group: the ranks that take part; None for the default group.
        bucket_cap_mb: MiB of gradients that are reduced together; None for 25.
        find_unused_parameters: allow parameters that get no gradient. If no rank has one it stays as it is, else
            zeros stand in where there is none. Nothing is reduced before backward ends.
        check_reduction: has no effect, as in torch.
        gradient_as_bucket_view: has no effect: gradients are reduced where they are, there are no bucket copies.
        static_graph: backward goes the same way every time; the first one shows which parameters it leaves out, and
            which get several gradients.
        delay_all_reduce_named_params: pairs of a name and a parameter, whose gradients are averaged apart from all
            others, also under `no_sync`, at the end of each backward that reaches `param_to_hook_all_reduce`.
        param_to_hook_all_reduce: a parameter that is trained.
        mixed_precision: torch's `_MixedPrecision`. Gradients are averaged in its `reduce_dtype`; casting parameters or
            buffers is refused, since `torch.autocast` does it.
        device_mesh: a mesh of one dimension over all ranks, which stands for the default group.
        skip_all_reduce_unused_params: has no effect: a gradient that no rank has is never reduced.
        bucket_cap_mb_list: the MiB of the first bucket, the second, and so on; the last number is for all others.
        batched_grad_copy: has no effect: there are no bucket copies.
        forward_sync_buffers: copy rank 0's buffers to all ranks before each forward in training mode, and at the end
            of `join`; None for True.
        deterministic: compute and average so that training ends with the same bits on any number of ranks, which is a
            power of two (see docs/reproducible.md).
        logical_shards: with `deterministic`, a power of two of at least the number of ranks: a step's samples are dealt
            out to that many shards, each computed by itself. Runs with the same number end with the same bits.
        seed: with `deterministic`, the seed of the shards' random numbers.
        overlap: reduce gradients while backward computes others. None: where each rank of this host has a core to
            spare (see docs/data-parallel.md), and always on GPUs.

    Raises:
        CollectiveMismatchError: the models, or these arguments, differ between ranks; on every rank.
        ValueError: a parameter is on a device that the group has no engine for, or not on the first of `device_ids`;
            `device_ids` or `output_device` names a GPU that does not exist; arguments contradict each other.
        RuntimeError: no parameter requires a gradient.
        TypeError: the module has parameters of a dtype that cannot be averaged.

    The attribute `module` is the wrapped model; `state_dict` has its keys with the prefix "module.".

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
        *,
        deterministic: bool = False,
        logical_shards: int | None = None,
        seed: int = 0,
        overlap: bool | None = None,
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
        self.overlap = bool(overlap)
        tracked = collect_tracked(module, [name for name, _ in self._delayed_pairs])
        has_delayed = bool(self._delayed_pairs)
        problem = unsupported_reason(tracked, self.process_group, self.device_ids, self.output_device, has_delayed)
        if init_sync:
            everyones = require_same_module(
                tracked,
                {
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
                },
                rank_facts(self.process_group, overlap, on_cpu=any(t.is_cpu for t in tracked.trained.values())),
                problem,
                self.process_group,
            )
            self.overlap = all(facts.overlaps for facts in everyones)
            warn_of_too_many_threads(everyones, self.process_group)
            broadcast_tensors(tracked.tensors(init_sync_buffers), self.process_group)
        elif problem is not None:
            raise problem
        self._start()
        if self._delayed is not None:
            self._delayed.broadcast()

    def forward(self, *args: object, **kwargs: object) -> object:
        """Calls the module; the backward of what it returns averages the gradients (see `no_sync`).

        Inside a backward, where `torch.utils.checkpoint` calls a module again, no buffers are copied, and that backward
        averages.

        Raises:
            RuntimeError: the last backward left gradients that were not averaged, or a module with `deterministic` is
                called inside a backward.
        """
        records = torch.is_grad_enabled()
        if self._replica is not None and records:
            self._watched.check_unchanged()
            return self._replica(args, kwargs, self.require_backward_grad_sync)
        if records and self._reducer.is_recomputing():
            output = self._call(args, kwargs)
            self._reducer.follow(output)
            return output
        root = self._announce_step() if self._join_config.enable and records else 0
        if not (self.require_backward_grad_sync and records):
            return self._call(args, kwargs)
        self._reducer.before_forward((args, kwargs))
        self._watched.check_unchanged()
        if self.forward_sync_buffers and self.training:
            self._send_buffers(root)
        output = self._call(args, kwargs)
        self._reducer.expect(output, any(tensor.requires_grad for tensor in find_tensors((args, kwargs))))
        return output

    def _announce_step(self) -> int:
        Join.notify_join_context(self)
        return self._steps.announce(self._reducer, self.require_backward_grad_sync, self.will_sync_module_buffers())

    def _send_buffers(self, root: int) -> None:
        try:
            self._watched.send_buffers(root)
        except CollectiveError as error:
            reducer = self._reducer
            name = type(self.module).__name__
            add_context(error, sending_buffers_context(name, reducer.forwards + 1, reducer.awaits_backward()))
            raise

    def _call(self, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        if not self.device_ids:
            return self.module(*args, **kwargs)
        return apply_on_devices(self.module, self.device_ids, self.output_device, self.dim, args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose forwards have backwards that accumulate gradients without averaging them.

        The first backward of a forward after it averages what was accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may run out of inputs at different times.

        A rank that leaves it early takes part in the others' steps with zeros; at the end all ranks get the parameters
        and buffers of one that trained longest. Every step must be one forward and one backward.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks, which gives every input the
                same weight; otherwise by the number of those that still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: raise on all ranks instead, as soon as one has run out.

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
            ValueError: with `deterministic`, which deals every step out to all ranks evenly, and with
                `delay_all_reduce_named_params`, whose averaging a rank without inputs cannot take part in.
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
        """The device of the parameters."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks that take part."""
        return self.process_group

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Makes `hook(state, bucket)` average the gradients, a bucket at a time, instead of the engine.

        `bucket` is a `GradBucket`; the hook returns a `torch.futures.Future` of the averaged flat buffer, or the `Work`
        of a collective with `async_op=True` on it. Register the same hook on every rank. Hooks that compress are in
        `paceline.parallel.hooks`. A second backward of one forward hands the averaged gradients to the hook again.

        Raises:
            TypeError: `hook` is not callable.
            RuntimeError: the module has a hook already.
            ValueError: the module is `deterministic`.
        """
        self._require_not_deterministic("register_comm_hook")
        if not callable(hook):
            raise TypeError(
                f"the communication hook is a {type(hook).__name__}; it must be callable as hook(state, bucket)"
            )
        if self._reducer.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook was called twice on this module; wrap the module again to give it another hook"
            )
        self._reducer.comm_hook = CommHook(state, hook)

    def _require_not_deterministic(self, call: str) -> None:
        if self._replica is not None:
            raise ValueError(
                f"{call} got a module with deterministic=True, whose gradients are added in a fixed order; "
                "wrap it without deterministic"
            )

    def communication_wait_s(self) -> float:
        """Returns the seconds that backwards have spent, at their ends, on reducing gradients and waiting for it."""
        return self._reducer.wait_s

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}

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

    def _start(self) -> None:
        self._watched = WatchedModule(self.module, self.process_group, [name for name, _ in self._delayed_pairs])
        self._steps = UnevenSteps(self.process_group)
        self._reducer = Reducer(
            self._watched.tracked,
            self._bucket_caps,
            self.process_group,
            name=type(self.module).__name__,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            overlap=self.overlap,
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
                self.module, self._watched.tracked, self.logical_shards, self.seed, self.dim, self.process_group
            )


DistributedDataParallelCPU = DistributedDataParallel
