"""The gradients of a bucket as memory that is reduced where autograd put it.

A gradient is reduced in place when it has its parameter's dtype and layout, as autograd's gradients do. Any other is
reduced in a copy, which is written back when all reductions are over. A gradient whose memory other tensors read is
also reduced in a copy, where that matters; the copy replaces it, and the other tensors keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import nn

from paceline.engine.codes import DTYPE_CODES

_storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_is_contiguous = torch.Tensor.is_contiguous
_dtype = attrgetter("dtype")


def _references(tensor: torch.Tensor) -> int:
    assert _storage_use_count is not None
    return _storage_use_count(tensor.untyped_storage()._cdata)


_ALONE = _references(torch.empty(1, device="cpu")) if _storage_use_count is not None else 0


def shares_memory(gradient: torch.Tensor) -> bool:
    """Whether another tensor has the same storage.

    Autograd may take over a gradient that is still on its way to other layers: in `x + p.unsqueeze(0)`, with one
    sample, the gradients of `x` and `p` are views of one tensor. Reduced in place, it would reach those layers
    averaged. Returns True where torch does not provide the number of references.
    """
    return _storage_use_count is None or _references(gradient) > _ALONE


@dataclass
class Memory:
    """What one call reduces: addresses and lengths in bytes in turn, with the tensors that own the memory.

    `copies` are written back into gradients; `successors` replace gradients.
    """

    pieces: list[int]
    tensors: list[torch.Tensor]
    count: int
    copies: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)
    successors: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)

    def write_back(self) -> None:
        """Puts what was reduced in copies into the parameters' gradients."""
        for param, reduced in self.copies:
            assert param.grad is not None
            param.grad.detach().copy_(reduced)
        for param, reduced in self.successors:
            param.grad = reduced


class BucketGradients:
    """The gradients of `params`, which have one dtype; `names` are used in errors."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self.params = list(params)
        self._names = list(names)
        self.dtype = self.params[0].dtype
        self._device = self.params[0].device
        self.dtype_code = DTYPE_CODES[self.dtype]
        self._count = sum(param.numel() for param in self.params)
        self._layouts = [_layout_of(param) for param in self.params]
        self._pieces = [0] * (2 * len(self.params))
        self._pieces[1::2] = [param.nbytes for param in self.params]
        # A complex gradient may be a conjugate view, which only the flag of that gradient shows.
        self._plain = all(param.is_contiguous() for param in self.params) and not self.dtype.is_complex

    def missing(self) -> list[str]:
        """Returns the names of the parameters that have no gradient."""
        return [name for name, param in zip(self._names, self.params, strict=True) if param.grad is None]

    def collect(self, copy_shared: bool) -> Memory | None:
        """Returns the memory of the gradients as they are now; None when a parameter has no gradient.

        Args:
            copy_shared: copy gradients that share memory with other tensors.

        Raises:
            TypeError: a gradient is sparse, or of another type than its parameter had.
            ValueError: a gradient is on another device than its parameter was.
        """
        gradients = [gradient for param in self.params if (gradient := param.grad) is not None]
        if len(gradients) != len(self.params):
            return None
        if (
            self._plain
            and all(map(_is_contiguous, gradients))
            and set(map(_dtype, gradients)) <= {self.dtype}
            and gradients[0].device == self._device  # a module moves as a whole
            and not (copy_shared and any(map(shares_memory, gradients)))
        ):
            pieces = self._pieces.copy()
            pieces[0::2] = [gradient.data_ptr() for gradient in gradients]
            return Memory(pieces, gradients, self._count)
        return self._collect_each(gradients, copy_shared)

    def _collect_each(self, gradients: Sequence[torch.Tensor], copy_shared: bool) -> Memory:
        memory = Memory([], [], self._count)
        for param, name, layout, gradient in zip(self.params, self._names, self._layouts, gradients, strict=True):
            self._require_reducible(name, param, gradient)
            shared = copy_shared and shares_memory(gradient)
            dense = gradient.detach()
            if shared or not _lies_as(gradient, layout):
                dense = torch.empty_strided(gradient.shape, layout, dtype=gradient.dtype, device=gradient.device).copy_(
                    dense
                )
                # A view was made by the user, who reads its base: write to it. Autograd's own gradients are not views.
                (memory.successors if shared and not gradient._is_view() else memory.copies).append((param, dense))
            memory.pieces += (dense.data_ptr(), dense.nbytes)
            memory.tensors.append(dense)
        return memory

    def _require_reducible(self, name: str, param: nn.Parameter, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of parameter {name!r} is {gradient.layout}, which is averaged only for the "
                "weight of an nn.Embedding or nn.EmbeddingBag with sparse=True; use one, or sparse=False"
            )
        if gradient.device != self._device:
            raise ValueError(
                f"the gradient of parameter {name!r} is on {gradient.device}; when the module was wrapped, the "
                f"parameter was on {self._device}. Move the module first, then wrap it"
            )
        if gradient.dtype is not self.dtype:
            raise TypeError(
                f"the gradient of parameter {name!r} is of {gradient.dtype}; when the module was wrapped, the "
                f"parameter was of {self.dtype} (now it is of {param.dtype}). Convert the module first, then wrap it"
            )


def have_aliases(memories: Sequence[Memory]) -> bool:
    """Whether two gradients have the same memory."""
    addresses = [address for memory in memories for address in memory.pieces[0::2] if address]
    return len(set(addresses)) != len(addresses)


def _layout_of(param: nn.Parameter) -> tuple[int, ...]:
    """Returns the strides that autograd gives to the parameter's gradient."""
    return torch.empty_like(param, device="meta").stride()


def _lies_as(tensor: torch.Tensor, layout: tuple[int, ...]) -> bool:
    if tensor.is_conj() or tensor.is_neg():
        return False
    strides = zip(tensor.shape, tensor.stride(), layout, strict=True)
    return tensor.numel() == 0 or all(size == 1 or stride == wanted for size, stride, wanted in strides)
