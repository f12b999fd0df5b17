"""Data parallel training: every rank holds the model, takes a part of the batch, and averages gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from paceline.group.default import default_group
from paceline.group.process_group import ProcessGroup
from paceline.parallel.agreement import broadcast_tensors, byte_views, require_same_module
from paceline.parallel.buckets import MIB, make_buckets
from paceline.parallel.reducer import Reducer

DEFAULT_BUCKET_CAP_MB = 25
_CHECK_PARAMETERS_EVERY = 100  # forwards


class DistributedDataParallel(nn.Module):
    """Wraps `module` so that backward averages its gradients over the ranks.

    Args:
        module: a model on CPU, the same on every rank; rank 0's parameters and buffers are copied to all.
        device_ids, output_device: for GPUs; must be None.
        dim: for several devices a process; must be 0.
        broadcast_buffers: copy rank 0's buffers to all ranks before each forward in training mode.
        init_sync: compare and copy the model at the start; without it the ranks must hold the same one already.
        process_group: the ranks that take part; None for the default group.
        bucket_cap_mb: MiB of gradients that are reduced together; None for 25.
        find_unused_parameters: allow parameters that forward did not use, at the cost of walking its graph.
        check_reduction: without effect, as in torch.
        gradient_as_bucket_view: without effect: gradients are reduced where they are, there are no bucket copies.
        static_graph: forward uses the same parameters in the same way every time; the first backward shows how.

    Raises:
        CollectiveMismatchError: the models differ between ranks.
        ValueError: an argument or a parameter is for a GPU.
        RuntimeError: no parameter requires a gradient.
        TypeError: the module makes sparse gradients.

    The attribute `module` is the wrapped model; `state_dict` has its keys with the prefix "module.".
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
    ) -> None:
        super().__init__()
        if device_ids or output_device is not None:
            raise ValueError("device_ids and output_device are for GPUs; a model on CPU is wrapped without them")
        if dim != 0:
            raise ValueError(f"dim is {dim}; it is for splitting a batch between devices of one process and must be 0")
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; it must be positive")
        self.module = module
        self.process_group = default_group() if process_group is None else process_group
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.bucket_cap_mb = DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        self.require_backward_grad_sync = True
        self._check_module()
        if init_sync:
            require_same_module(module, self.process_group)
            broadcast_tensors([*module.parameters(), *module.buffers()], self.process_group)
        self._start()

    def forward(self, *args: object, **kwargs: object) -> object:
        """Calls the module; the backward of what it returns averages the gradients (see `no_sync`)."""
        reduces = self.require_backward_grad_sync and torch.is_grad_enabled()
        if reduces:
            self._reducer.require_complete()
            if self._forwards % _CHECK_PARAMETERS_EVERY == 0:
                self._check_unchanged()
            self._forwards += 1
        if self.broadcast_buffers and self.training and self.require_backward_grad_sync:
            self._broadcast_buffers()
        output = self.module(*args, **kwargs)
        if reduces:
            self._reducer.prepare(output)
        elif torch.is_grad_enabled():
            self._reducer.skip()
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

    def communication_wait_s(self) -> float:
        """The seconds that backwards have spent waiting for reductions since the start."""
        return self._reducer.wait_s

    def __getstate__(self) -> dict[str, object]:
        left_behind = ("process_group", "_reducer", "_params", "_buffer_bytes", "_buffer_addresses")
        return {name: value for name, value in self.__dict__.items() if name not in left_behind}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.process_group = default_group()
        self._start()

    def _start(self) -> None:
        named = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        self._params = [param for _, param in named]
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
            may_skip=self.find_unused_parameters and not self.static_graph,
            static_graph=self.static_graph,
        )
        self._forwards = 0
        self._buffer_bytes: list[torch.Tensor] = []
        self._buffer_addresses: list[int] = []

    def _check_module(self) -> None:
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if not tensor.is_cpu:
                raise ValueError(f"{name!r} is on {tensor.device}; the paceline engine works on CPU: module.cpu()")
        if not any(param.requires_grad for param in self.module.parameters()):
            raise RuntimeError(
                "no parameter of the module requires a gradient, so there is nothing to reduce; use it unwrapped"
            )
        for name, child in self.module.named_modules():
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
                raise TypeError(f"{name!r} makes sparse gradients, which are not reduced; build it with sparse=False")

    def _check_unchanged(self) -> None:
        current = [param for param in self.module.parameters() if param.requires_grad]
        if len(current) != len(self._params) or any(a is not b for a, b in zip(current, self._params, strict=True)):
            raise RuntimeError(
                f"the module's parameters changed after wrapping (there were {len(self._params)} that require a "
                f"gradient, now there are {len(current)}, or some were replaced); the new ones would not be reduced. "
                "Add, freeze or replace parameters first, then wrap"
            )

    def _broadcast_buffers(self) -> None:
        buffers = list(self.module.buffers())
        if not buffers:
            return
        addresses = [buffer.data_ptr() for buffer in buffers]
        if addresses != self._buffer_addresses:
            if not all(buffer.is_contiguous() for buffer in buffers):
                broadcast_tensors(buffers, self.process_group)
                return
            self._buffer_bytes = byte_views(buffers)
            self._buffer_addresses = addresses
        self.process_group.broadcast(self._buffer_bytes, 0)


DistributedDataParallelCPU = DistributedDataParallel
