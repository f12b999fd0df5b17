"""The gradients of a bucket as memory that is reduced where autograd put it.

A gradient is reduced in place if it has its parameter's dtype and layout, as autograd's gradients do. All others are
reduced in copies, which are written back when all reductions are over. A gradient that shares its memory with other
tensors is also reduced in a copy, if that matters; the copy replaces it, and the other tensors keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add, attrgetter, gt

import torch
from torch import nn

from paceline.engine.codes import DTYPE_CODES

_storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_is_contiguous = torch.Tensor.is_contiguous
_numel = torch.Tensor.numel
_dtype = attrgetter("dtype")


def _references(tensor: torch.Tensor) -> int:
    assert _storage_use_count is not None
    return _storage_use_count(tensor.untyped_storage()._cdata)


_ALONE = _references(torch.empty(1, device="cpu")) if _storage_use_count is not None else 0


def shares_memory(gradient: torch.Tensor) -> bool:
    """Returns whether another tensor has the same storage; True if torch does not provide the number of references.

    A parameter's gradient may be a tensor that autograd still passes on to other layers: in `x + p.unsqueeze(0)`, with
    one sample, the gradients of `x` and `p` are views of one tensor. If it were reduced in place, those layers would
    receive the average.
    """
    return _storage_use_count is None or _references(gradient) > _ALONE


@dataclass
class Memory:
    """The memory that one call reduces.

    Attributes:
        pieces: an address and a length in bytes for each tensor, in turn.
        tensors: the owners of the memory.
        count: the number of elements.
        copies: tensors that are written back to the gradients of their parameters.
        successors: tensors that replace the gradients of their parameters.
    """

    pieces: list[int]
    tensors: list[torch.Tensor]
    count: int
    copies: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)
    successors: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)

    def write_back(self) -> None:
        """Writes the results that are in copies to the parameters' gradients."""
        for param, reduced in self.copies:
            assert param.grad is not None
            param.grad.detach().copy_(reduced)
        for param, reduced in self.successors:
            param.grad = reduced


class BucketGradients:
    """The gradients of `params`, which have one dtype; `names` are used in errors."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self.params = list(params)
        self.names = list(names)
        self.dtype = self.params[0].dtype
        self._device = self.params[0].device
        self.dtype_code = DTYPE_CODES[self.dtype]
        self._shapes = [param.shape for param in self.params]
        self._layouts = [_layout_of(param) for param in self.params]
        self._numels = [param.numel() for param in self.params]
        self._count = sum(self._numels)
        self._pieces = [0] * (2 * len(self.params))
        self._pieces[1::2] = [param.nbytes for param in self.params]
        # A complex gradient may be a conjugate view, which only the flag of that gradient shows.
        self._plain = all(param.is_contiguous() for param in self.params) and not self.dtype.is_complex

    def missing(self) -> list[str]:
        """Returns the names of the parameters that have no gradient."""
        return [name for name, param in zip(self.names, self.params, strict=True) if param.grad is None]

    def collect(self, copy_shared: bool) -> Memory | None:
        """Returns the memory of the gradients as they are now, None if a parameter has no gradient.

        Args:
            copy_shared: whether gradients that share memory with other tensors are copied.

        Raises:
            TypeError: a gradient is sparse, or of another type than its parameter had.
            ValueError: a gradient is on another device than its parameter was, or has another shape.
        """
        gradients = [gradient for param in self.params if (gradient := param.grad) is not None]
        if len(gradients) != len(self.params):
            return None
        if (
            self._plain
            and all(map(_is_contiguous, gradients))
            and set(map(_dtype, gradients)) <= {self.dtype}
            and list(map(_numel, gradients)) == self._numels
            and gradients[0].device == self._device  # a module moves as a whole
            and not (copy_shared and any(map(shares_memory, gradients)))
        ):
            pieces = self._pieces.copy()
            pieces[0::2] = [gradient.data_ptr() for gradient in gradients]
            return Memory(pieces, gradients, self._count)
        return self._collect_each(gradients, copy_shared)

    def _collect_each(self, gradients: Sequence[torch.Tensor], copy_shared: bool) -> Memory:
        memory = Memory([], [], self._count)
        known = zip(self.params, self.names, self._shapes, self._layouts, gradients, strict=True)
        for param, name, shape, layout, gradient in known:
            self._require_reducible(name, param, shape, gradient)
            shared = copy_shared and shares_memory(gradient)
            dense = gradient.detach()
            if shared or not _lies_as(gradient, layout):
                dense = torch.empty_strided(gradient.shape, layout, dtype=gradient.dtype, device=gradient.device).copy_(
                    dense
                )
                # The user has made this view and reads its base, so it is written to. Autograd makes no views.
                (memory.successors if shared and not gradient._is_view() else memory.copies).append((param, dense))
            memory.pieces += (dense.data_ptr(), dense.nbytes)
            memory.tensors.append(dense)
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


def have_aliases(memories: Sequence[Memory]) -> bool:
    """Returns whether the memory of two gradients overlaps.

    A gradient may be a part of another one: in `torch.cat([fixed, p]) + q`, the gradient of `p` is a view of that of
    `q`. Memory that does not overlap ends, piece after piece, before the next piece starts.
    """
    starts = sorted(address for memory in memories for address in memory.pieces[0::2])
    ends = sorted(end for memory in memories for end in map(add, memory.pieces[0::2], memory.pieces[1::2]))
    return any(map(gt, ends, starts[1:]))


def _layout_of(param: nn.Parameter) -> tuple[int, ...]:
    """Returns the strides that autograd gives to the parameter's gradient."""
    return torch.empty_like(param, device="meta").stride()


def _lies_as(tensor: torch.Tensor, layout: tuple[int, ...]) -> bool:
    if tensor.is_conj() or tensor.is_neg():
        return False
    strides = zip(tensor.shape, tensor.stride(), layout, strict=True)
    return tensor.numel() == 0 or all(size == 1 or stride == wanted for size, stride, wanted in strides)
