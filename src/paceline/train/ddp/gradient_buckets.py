"""GradientBuckets: collects the gradients of a module in buckets for reduction.

On the CPU, gradients with the dtype and layout of their parameters, such as those from autograd, are reduced in place.
Other gradients are reduced in copies, which are written back when all reductions have completed. A gradient that shares
its memory with other tensors may be reduced in a copy that replaces it, to preserve the values of those tensors. On
other devices, where a call for each gradient would cost more than a copy, the gradients of a bucket become views of one
flat tensor (`FlatGradients`).

Sparse gradients contain only some rows of a parameter. The rows differ between ranks, and each sparse gradient is
averaged separately.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import add, attrgetter, gt

import torch
from torch import nn

from paceline.comm.engine.channel import DTYPE_CODES, ReduceOp
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.sparse_sum import GatheredRows
from paceline.train.ddp.bucket_assignment import bucket_params
from paceline.train.module_tensors import TrackedTensors, references_of, shares_memory

_data_ptr = torch.Tensor.data_ptr
_stride = torch.Tensor.stride


class FlatGradients:
    """The gradients of a bucket on an accelerator, as parts of one flat tensor that is reduced in one call.

    Autograd computes each gradient in separate memory. When all gradients of a bucket have been computed, they are
    copied into the flat tensor, whose parts replace them. If the program keeps the gradients
    (`zero_grad(set_to_none=False)`, or accumulation within `no_sync`), autograd accumulates into these parts, and no
    further copies are needed. If the program discards the gradients, the flat tensor is kept for the next backward
    pass, because creating its parts again would cost the host more than all other work. If the program still references
    a gradient, the next backward pass allocates a new flat tensor, and the saved gradient keeps its values.

    All parameters have one dtype and are on one device; `layouts` contains the strides of each parameter's gradient.
    """

    def __init__(self, params: Sequence[nn.Parameter], layouts: Sequence[tuple[int, ...]]) -> None:
        self._shapes = [param.shape for param in params]
        self._layouts = list(layouts)
        self._numels = [param.numel() for param in params]
        self._are_plain = [param.is_contiguous() for param in params]
        self._dtype, self._device = params[0].dtype, params[0].device
        self._whole: torch.Tensor | None = None
        self._parts: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._strides: list[tuple[int, ...]] = []
        self._references: list[int] = []

    def has(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Returns True if `gradients` are exactly the parts of the flat tensor, in order."""
        return (
            list(map(_data_ptr, gradients)) == self._addresses
            and self._whole is not None
            and list(map(_stride, gradients)) == self._strides
            and not any(gradient.requires_grad or gradient.is_conj() or gradient.is_neg() for gradient in gradients)
        )

    def whole(self) -> torch.Tensor:
        """Returns the flat tensor, which must exist (see `has`)."""
        assert self._whole is not None
        return self._whole

    def copy_of(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copies the gradients into the flat tensor; returns that tensor and its parts."""
        with torch.no_grad():
            if self._whole is None or self._count_references() != self._references:
                self._allocate()
                self._references = self._count_references()
            torch._foreach_copy_(self._parts, list(gradients))
        return self.whole(), self._parts

    def _allocate(self) -> None:
        self._whole = torch.empty(sum(self._numels), dtype=self._dtype, device=self._device)
        known = zip(self._whole.split(self._numels), self._shapes, self._layouts, self._are_plain, strict=True)
        # Tensors from `data` are not marked as views; views would reject `detach_`, which programs call on gradients.
        self._parts = [
            (part.view(shape) if is_plain else part.as_strided(shape, layout)).data
            for part, shape, layout, is_plain in known
        ]
        self._addresses = list(map(_data_ptr, self._parts))
        self._strides = list(map(_stride, self._parts))

    def _count_references(self) -> list[int]:
        """Returns the reference counts of the storage and of the parts; changes reveal references by other objects."""
        assert self._whole is not None
        in_use = references_of(self._whole)
        if in_use is None:
            return [*self._references, 0]  # never equal to the stored counts, so the memory is never reused
        return [in_use, *map(sys.getrefcount, self._parts)]


_is_contiguous = torch.Tensor.is_contiguous
_numel = torch.Tensor.numel
_dtype = attrgetter("dtype")
_shape = attrgetter("shape")
_kind = attrgetter("dtype", "device", "layout")


class GradientBuckets:
    """Tracks the gradients of a module's trained parameters, and selects the gradients to average.

    Dense gradients are averaged in buckets, and sparse gradients are then averaged separately. The index of a parameter
    is its position in `params`.
    """

    def __init__(self, tracked: TrackedTensors, bucket_caps_bytes: Sequence[int]) -> None:
        # - The trained parameters, which never change
        self.names = list(tracked.trained)
        self.params = list(tracked.trained.values())
        self.are_on_device = any(not param.is_cpu for param in self.params)
        self.are_on_several = len({param.device for param in self.params}) > 1
        self._caps_bytes = bucket_caps_bytes
        sparse = [index for index, name in enumerate(self.names) if name in tracked.sparse]
        self.buckets = bucket_params(self.params, bucket_caps_bytes, left_out=sparse, may_exceed=self.are_on_device)

        # - The gradients that every backward pass should compute, except those that `settle_present` has permanently
        #   excluded
        self._expected: list[BucketGradients | None] = [self._gradients_of(bucket.params) for bucket in self.buckets]
        self._expected_sparse = sparse
        self._settled: list[bool] | None = None  # one flag per parameter: whether `settle_present` kept it
        # The parameters in a static graph for which only other ranks compute gradients; this rank contributes zeros.
        self._absent: list[int] = []

        # - The gradients that the current backward pass averages, except those that `take_present` has excluded. A
        #   bucket is None if no rank has any of its gradients.
        self.active = self._expected
        self._active_sparse = self._expected_sparse

    def _gradients_of(self, indices: Sequence[int]) -> BucketGradients:
        return BucketGradients([self.params[index] for index in indices], [self.names[index] for index in indices])

    def named(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by name."""
        return dict(zip(self.names, self.params, strict=True))

    def active_sparse(self) -> dict[str, nn.Parameter]:
        """Returns the parameters, by name, whose sparse gradients the current backward pass averages."""
        return {self.names[index]: self.params[index] for index in self._active_sparse}

    def is_last(self, bucket: int) -> bool:
        """Returns True if this is the last bucket that the current backward pass averages."""
        return all(later is None for later in self.active[bucket + 1 :])

    # - Presence of gradients

    def missing(self) -> list[str]:
        """Returns the names of the parameters that should have a gradient but do not."""
        missing = {name for gradients in self._expected if gradients is not None for name in gradients.missing()}
        missing.update(self.names[index] for index in self._expected_sparse if self.params[index].grad is None)
        return [name for name in self.names if name in missing]

    def are_incomplete(self) -> bool:
        """Returns True if any gradient is missing, other than those that `fill_absent` sets."""
        absent = {self.names[index] for index in self._absent}
        return not absent.issuperset(self.missing())

    def any_present(self) -> bool:
        """Returns True if any parameter has a gradient."""
        return any(param.grad is not None for param in self.params)

    # - Selection of the gradients to average

    def take_present(self, group: ProcessGroup) -> None:
        """Omits from the average the gradients that no rank has; uses zeros for those that only other ranks have."""
        anywhere = self._present_anywhere(group)
        self.active, self._active_sparse = self._restricted(anywhere)
        self._fill([index for index, is_present in enumerate(anywhere) if is_present])

    @contextmanager
    def only_present(self, group: ProcessGroup) -> Iterator[None]:
        """Returns a context that applies `take_present`; on exit, all gradients are selected again."""
        self.take_present(group)
        try:
            yield
        finally:
            self.active, self._active_sparse = self._expected, self._expected_sparse

    def settle_present(self, group: ProcessGroup) -> list[bool]:
        """Permanently excludes gradients that no rank has, and records gradients that only other ranks have.

        Does nothing if no rank has any gradient, because the backward pass did not reach the module's parameters.
        Returns, for each parameter, whether any rank has a gradient for it.
        """
        mine = [param.grad is not None for param in self.params]
        anywhere = self._present_anywhere(group)
        if any(anywhere):
            self._absent = [index for index, is_present in enumerate(anywhere) if is_present and not mine[index]]
            self._settled = anywhere
            self._expected, self._expected_sparse = self.active, self._active_sparse = self._restricted(anywhere)
        return anywhere

    # - Order of the buckets

    def reorder(self, order: Sequence[int]) -> None:
        """Rebuilds the buckets in `order`, the order in which a backward pass computed the gradients."""
        sparse = [index for index in range(len(self.params)) if index not in order]
        self.buckets = bucket_params(self.params, self._caps_bytes, sparse, order=order, may_exceed=self.are_on_device)
        self._expected = [self._gradients_of(bucket.params) for bucket in self.buckets]
        if self._settled is not None:
            self._expected, _ = self._restricted(self._settled)
        self.active = self._expected

    # - Gradient values

    def fill_absent(self) -> None:
        """With a static graph, zeroes the gradients that only other ranks compute."""
        self._fill(self._absent)

    def fill_missing(self) -> None:
        """Replaces all gradients that are None with zeros."""
        self._fill(range(len(self.params)))

    def zeros(self) -> list[torch.Tensor]:
        """Returns a zero gradient for each parameter."""
        return [self._zero(index) for index in range(len(self.params))]

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
        return [bool(is_present) for is_present in present.tolist()]

    def _restricted(self, kept: Sequence[bool]) -> tuple[list[BucketGradients | None], list[int]]:
        restricted: list[BucketGradients | None] = []
        for bucket, gradients in zip(self.buckets, self._expected, strict=True):
            chosen = [index for index in bucket.params if kept[index]]
            if len(chosen) != len(bucket.params):
                gradients = self._gradients_of(chosen) if chosen else None
            restricted.append(gradients)
        return restricted, [index for index in self._expected_sparse if kept[index]]

    def _fill(self, indices: Sequence[int]) -> None:
        for index in indices:
            if self.params[index].grad is None:
                self.params[index].grad = self._zero(index)

    def _zero(self, index: int) -> torch.Tensor:
        param = self.params[index]
        return empty_gradient(param) if index in self._expected_sparse else torch.zeros_like(param)


@dataclass
class GradientMemory:
    """The memory that one collective reduces.

    After the reduction, the values of the tensors in `copies` are copied back to the gradients of the parameters, and
    the tensors in `successors` replace the gradients.
    """

    pieces: list[int]  # alternates between the address and the length in bytes of each tensor
    tensors: list[torch.Tensor]  # the tensors that own the memory
    count: int  # the total number of elements
    copies: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)
    successors: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)
    views: list[torch.Tensor] | None = None  # one view per parameter if the memory is a single flat tensor

    def write_back(self) -> None:
        """Transfers results from copies to the parameters' gradients."""
        for param, reduced in self.copies:
            assert param.grad is not None
            param.grad.detach().copy_(reduced)
        for param, reduced in self.successors:
            param.grad = reduced


class BucketGradients:
    """The gradients of one bucket: parameters of one dtype on one device."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self.params = list(params)
        self.names = list(names)
        self._device = self.params[0].device
        self._shapes = [param.shape for param in self.params]
        self._numels = [param.numel() for param in self.params]
        self._count = sum(self._numels)
        self._set_dtype(self.params[0].dtype)

    def _set_dtype(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.dtype_code = DTYPE_CODES[dtype]
        # Autograd computes gradients with these strides.
        self._layouts = [torch.empty_like(param, device="meta").stride() for param in self.params]
        self._pieces = [0] * (2 * len(self.params))
        self._pieces[1::2] = [param.nbytes for param in self.params]
        # A complex gradient may be a conjugate view, which the fast path does not detect.
        self._plain = all(param.is_contiguous() for param in self.params) and not dtype.is_complex
        self._flat = None if self._device.type == "cpu" else FlatGradients(self.params, self._layouts)

    def _follow_conversion(self, dtype: torch.dtype) -> None:
        if dtype in DTYPE_CODES and all(param.dtype is dtype for param in self.params):
            self._set_dtype(dtype)

    def missing(self) -> list[str]:
        """Returns the names of the parameters that have no gradient."""
        return [name for name, param in zip(self.names, self.params, strict=True) if param.grad is None]

    def collect(self, copy_shared: bool) -> GradientMemory | None:
        """Returns the memory of the current gradients, or None if a parameter has no gradient.

        If `copy_shared` is True, gradients that share memory with other tensors are copied. If the program has
        converted all of the bucket's parameters to another dtype, such as by `double()`, the bucket adopts the dtype.
        Other changes to the parameters since the module was wrapped are errors.
        """
        gradients = [gradient for param in self.params if (gradient := param.grad) is not None]
        if len(gradients) != len(self.params):
            return None
        if (dtype := gradients[0].dtype) is not self.dtype:
            self._follow_conversion(dtype)
        if self._flat is not None:
            return self._collect_flat(self._flat, gradients)
        if (
            self._plain
            and all(map(_is_contiguous, gradients))
            and set(map(_dtype, gradients)) <= {self.dtype}
            and list(map(_numel, gradients)) == self._numels
            and gradients[0].device == self._device  # a module moves as a whole, so one check suffices
            and not (copy_shared and any(map(shares_memory, gradients)))
        ):
            pieces = self._pieces.copy()
            pieces[0::2] = [gradient.data_ptr() for gradient in gradients]
            return GradientMemory(pieces, gradients, self._count)
        return self._collect_singly(gradients, copy_shared)

    def _collect_singly(self, gradients: Sequence[torch.Tensor], copy_shared: bool) -> GradientMemory:
        memory = GradientMemory([], [], self._count)
        known = zip(self.params, self.names, self._shapes, self._layouts, gradients, strict=True)
        for param, name, shape, layout, gradient in known:
            self._require_reducible(name, param, shape, gradient)
            shared = copy_shared and shares_memory(gradient)
            dense = gradient.detach()
            if shared or not _lies_as(gradient, layout):
                dense = torch.empty_strided(gradient.shape, layout, dtype=gradient.dtype, device=gradient.device).copy_(
                    dense
                )
                # Autograd does not create views. The user created this one and may read its base, so copy into the
                # base.
                (memory.successors if shared and not gradient._is_view() else memory.copies).append((param, dense))
            memory.pieces += (dense.data_ptr(), dense.nbytes)
            memory.tensors.append(dense)
        return memory

    def _collect_flat(self, flat: FlatGradients, gradients: list[torch.Tensor]) -> GradientMemory:
        kinds = set(map(_kind, gradients))
        if kinds != {(self.dtype, self._device, torch.strided)} or list(map(_shape, gradients)) != self._shapes:
            for param, name, shape, gradient in zip(self.params, self.names, self._shapes, gradients, strict=True):
                self._require_reducible(name, param, shape, gradient)
        if flat.has(gradients):
            whole = flat.whole()
            return GradientMemory([whole.data_ptr(), whole.nbytes], [whole], self._count, views=gradients)
        whole, views = flat.copy_of(gradients)
        memory = GradientMemory([whole.data_ptr(), whole.nbytes], [whole], self._count, views=views)
        for param, gradient, view in zip(self.params, gradients, views, strict=True):
            # Autograd does not create views, so a view was created by the user, who may read its base. A gradient with
            # a graph must keep the graph. In both cases, the values are copied in place.
            if gradient._is_view() or gradient.requires_grad:
                memory.copies.append((param, view))
            else:
                param.grad = view
        return memory

    def _require_reducible(self, name: str, param: nn.Parameter, shape: torch.Size, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of parameter {name!r} is {gradient.layout}, which is averaged only for the "
                "weight of an nn.Embedding or nn.EmbeddingBag with sparse=True; use one, or sparse=False"
            )
        if gradient.device != self._device:
            raise ValueError(
                f"the gradient of parameter {name!r} is on {gradient.device}; when the module was wrapped, the "
                f"parameter was on {self._device}. Move the module first and wrap it afterwards"
            )
        if gradient.shape != shape:
            raise ValueError(
                f"the gradient of parameter {name!r} has the shape {list(gradient.shape)}; when the module was "
                f"wrapped, the parameter had the shape {list(shape)} (now it has {list(param.shape)}). Change the "
                "module first and wrap it afterwards"
            )
        if gradient.dtype is not self.dtype:
            raise TypeError(
                f"the gradient of parameter {name!r} is of {gradient.dtype}; when the module was wrapped, the "
                f"parameter was of {self.dtype} (now it is of {param.dtype}). Convert the module first "
                "and wrap it afterwards"
            )


def have_aliases(memories: Sequence[GradientMemory]) -> bool:
    """Returns True if the memory of any two gradients overlaps.

    A gradient may be part of another gradient: in `torch.cat([fixed, p]) + q`, the gradient of `p` is a view of the
    gradient of `q`. If no gradients overlap, each piece of memory ends before the next piece starts.
    """
    starts = sorted(address for memory in memories for address in memory.pieces[0::2])
    ends = sorted(end for memory in memories for end in map(add, memory.pieces[0::2], memory.pieces[1::2]))
    return any(map(gt, ends, starts[1:]))


def _lies_as(tensor: torch.Tensor, layout: tuple[int, ...]) -> bool:
    if tensor.is_conj() or tensor.is_neg():
        return False
    strides = zip(tensor.shape, tensor.stride(), layout, strict=True)
    return tensor.numel() == 0 or all(size == 1 or stride == wanted for size, stride, wanted in strides)


def empty_gradient(param: nn.Parameter) -> torch.Tensor:
    """Returns a sparse gradient without rows."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
    values = torch.empty(0, *param.shape[1:], dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(
        indices, values, param.shape, is_coalesced=True, check_invariants=False, device=param.device
    )


def average_sparse(params: Collection[nn.Parameter], group: ProcessGroup, scale: float) -> None:
    """Averages sparse gradients over the ranks and multiplies them by `scale`.

    One collective exchanges the row counts; one more collective per parameter exchanges the rows.
    """
    gradients = [_coalesced(param) for param in params]
    counts = torch.tensor([gradient._nnz() for gradient in gradients], device="cpu")
    everyones = [torch.empty_like(counts) for _ in range(group.size())]
    group.all_gather(everyones, counts)
    by_param = torch.stack(everyones, 1).tolist()
    for param, gradient, rows in zip(params, gradients, by_param, strict=True):
        gathered = GatheredRows(gradient, rows)
        group.all_to_all(gathered.received, [gathered.mine] * group.size())
        param.grad = gathered.total().mul_(scale / group.size())


def _coalesced(param: nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    gradient = param.grad.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
