"""Data parallel training: every rank holds the model, takes a part of the batch, and averages gradients."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from paceline.group.default import default_group
from paceline.group.process_group import ProcessGroup
from paceline.parallel.agreement import broadcast_tensors, byte_views, require_same_module
from paceline.parallel.bucket_hook import CommHook, Hook
from paceline.parallel.buckets import MIB, make_buckets
from paceline.parallel.conditions import has_core_to_spare, why_not
from paceline.parallel.graph import find_tensors
from paceline.parallel.join import Join, Joinable, JoinHook
from paceline.parallel.reducer import Reducer
from paceline.parallel.structure import ModuleStructure
from paceline.parallel.uneven import UnevenInputs, announce_step

DEFAULT_BUCKET_CAP_MB = 25
_LOOK_AGAIN_EVERY = 16  # forwards, whether the module was changed
_OF_THIS_PROCESS = ("process_group", "_reducer", "_structure", "_params", "_frozen", "_buffers_sent", "_buffer_bytes")


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps `module` so that backward averages its gradients over the ranks.

    Args:
        module: a model on CPU, the same on every rank; rank 0's parameters and buffers are copied to all.
        device_ids, output_device: for GPUs; leave them out.
        dim: for several devices a process; must be 0.
        broadcast_buffers: copy rank 0's buffers to all ranks before each forward in training mode.
        init_sync: compare and copy the model at the start; without it the ranks must hold the same one already.
        process_group: the ranks that take part; None for the default group.
        bucket_cap_mb: MiB of gradients that are reduced together; None for 25.
        find_unused_parameters: allow parameters that get no gradient. If no rank has one it stays as it is, else
            zeros stand in where there is none. Nothing is reduced before backward ends.
        check_reduction: without effect, as in torch.
        gradient_as_bucket_view: without effect: gradients are reduced where they are, there are no bucket copies.
        static_graph: backward goes the same way every time; the first one shows which parameters it leaves out, and
            which it comes to several times.
        overlap: reduce gradients while backward computes others. None: where each rank of this host has a core to
            spare for it (see docs/data-parallel.md).

    Raises:
        CollectiveMismatchError: the models, or these arguments, differ between ranks; on every rank.
        ValueError: an argument or a parameter is for a GPU.
        RuntimeError: no parameter requires a gradient.
        TypeError: the module makes sparse gradients, or has parameters of a type that cannot be averaged.

    The attribute `module` is the wrapped model; `state_dict` has its keys with the prefix "module.".

    Example::

        model = paceline.DistributedDataParallel(model)
        loss_function(model(inputs), targets).backward()  # the same gradients on every rank
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        overlap: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        if device_ids or output_device is not None:
            raise ValueError(
                f"device_ids is {device_ids} and output_device is {output_device}, but they are for GPUs, and this "
                "version trains models on CPU: DistributedDataParallel(module)"
            )
        if dim != 0:
            raise ValueError(f"dim is {dim}; it is for splitting a batch between devices of one process and must be 0")
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; it must be positive")
        self.module = module
        self.process_group = default_group() if process_group is None else process_group
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.bucket_cap_mb = DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        self.require_backward_grad_sync = True
        self.overlap = bool(overlap)
        problem = why_not(module)
        if init_sync:
            wishes = require_same_module(
                module,
                {
                    "broadcast_buffers": broadcast_buffers,
                    "bucket_cap_mb": self.bucket_cap_mb,
                    "find_unused_parameters": find_unused_parameters,
                    "static_graph": static_graph,
                    "overlap": overlap,
                },
                has_core_to_spare(self.process_group) if overlap is None else overlap,
                problem,
                self.process_group,
            )
            self.overlap = all(wishes)
            broadcast_tensors([*module.parameters(), *module.buffers()], self.process_group)
        elif problem is not None:
            raise problem
        self._divide_by_initial_world_size = True
        self._start()

    def forward(self, *args: object, **kwargs: object) -> object:
        """Calls the module; the backward of what it returns averages the gradients (see `no_sync`)."""
        syncs = self.require_backward_grad_sync
        root = 0  # of the buffers
        if self._join_config.enable and torch.is_grad_enabled():
            root = announce_step(self)
        if not (syncs and torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        self._reducer.require_complete()
        if self._forwards % _LOOK_AGAIN_EVERY == 0:
            self._require_unchanged()
        self._forwards += 1
        if self.broadcast_buffers and self.training:
            self._broadcast_buffers(root)
        output = self.module(*args, **kwargs)
        self._reducer.expect(output, any(tensor.requires_grad for tensor in find_tensors((args, kwargs))))
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards made within accumulate gradients without reducing them.

        The first backward after it reduces what was accumulated.
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
        and buffers of one that trained longest. Every step is to be one forward and one backward.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks, which weighs every input alike;
                otherwise by the number of those that still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: raise on all ranks instead, as soon as one has run out.

        Example::

            with model.join():
                for inputs, targets in loader:  # of another length on each rank
                    loss_function(model(inputs), targets).backward()
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: object) -> JoinHook:
        """What this module does in `Join`; takes `divide_by_initial_world_size`."""
        return UnevenInputs(self, bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def join_device(self) -> torch.device:
        """Where the parameters are."""
        return self._params[0].device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks."""
        return self.process_group

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Has `hook(state, bucket)` average the gradients, a bucket at a time, instead of the engine.

        `bucket` is a `GradBucket`; the hook returns a `torch.futures.Future` of the averaged flat buffer, or the `Work`
        of a collective with `async_op=True` on it. Register the same hook on every rank. Hooks that compress are in
        `paceline.parallel.hooks`. A second backward of one forward hands the averaged gradients to the hook again.

        Raises:
            TypeError: `hook` cannot be called.
            RuntimeError: there is one already.
        """
        if not callable(hook):
            raise TypeError(
                f"the communication hook is a {type(hook).__name__}; it must be callable as hook(state, bucket)"
            )
        if self._reducer.exchange.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook was called twice on this module; wrap the module again to give it another hook"
            )
        self._reducer.exchange.comm_hook = CommHook(state, hook)

    def communication_wait_s(self) -> float:
        """The seconds that backwards have spent, at their ends, reducing gradients and waiting for reductions."""
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
        named = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        self._params = [param for _, param in named]
        self._frozen = [param for param in self.module.parameters() if not param.requires_grad]
        self._structure = ModuleStructure(self.module)
        buckets = make_buckets(
            [param.nbytes for param in self._params],
            [param.dtype for param in self._params],
            int(self.bucket_cap_mb * MIB),
        )
        self._reducer = Reducer(
            self._params,
            [name for name, _ in named],
            buckets,
            self.process_group,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            overlap=self.overlap,
        )
        # The hooks must not outlive the wrapper: the module may be wrapped again.
        weakref.finalize(self, self._reducer.close).atexit = False
        self._forwards = 0
        self._buffers_sent: list[int] = []
        self._buffer_bytes: list[torch.Tensor] = []

    def _require_unchanged(self) -> None:
        if not self._structure.is_unchanged():
            raise RuntimeError(
                f"rank {self.process_group.ranks[self.process_group.rank()]}: the module changed after wrapping: "
                "parameters or submodules were added, removed or replaced, and the new ones would not be averaged over "
                "the ranks. Change the module first, then wrap it (again, if need be)"
            )
        for param in self._frozen:
            if param.requires_grad:
                name = next(name for name, each in self.module.named_parameters() if each is param)
                raise RuntimeError(
                    f"rank {self.process_group.ranks[self.process_group.rank()]}: parameter {name!r} did not require a "
                    "gradient when the module was wrapped and does now; it would not be averaged over the ranks. "
                    "Unfreeze parameters first, then wrap the module (again, if need be)"
                )

    def _broadcast_buffers(self, root: int) -> None:
        buffers = self._structure.buffers()
        if not buffers:
            return
        addresses = [buffer.data_ptr() for buffer in buffers]
        if addresses != self._buffers_sent:
            if not all(buffer.is_contiguous() for buffer in buffers):
                broadcast_tensors(buffers, self.process_group, root)
                return
            self._buffer_bytes = byte_views(buffers)
            self._buffers_sent = addresses
        self.process_group.broadcast(self._buffer_bytes, root)


DistributedDataParallelCPU = DistributedDataParallel
