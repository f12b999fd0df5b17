"""FlatGradients: the gradients of a bucket on an accelerator, as parts of one flat tensor that one call reduces.

Autograd computes each gradient in separate memory. When all gradients of a bucket have been computed, they are copied
into the flat tensor, whose parts replace them. If the program keeps the gradients (`zero_grad(set_to_none=False)`, or
accumulation within `no_sync`), autograd accumulates into these parts, and no further copies are needed. If the program
discards the gradients, the flat tensor is kept for the next backward pass, because creating its parts again would cost
the host more than all other work. If the program still references a gradient, the next backward pass allocates a new
flat tensor, and the saved gradient keeps its values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

_storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_data_ptr = torch.Tensor.data_ptr
_stride = torch.Tensor.stride


class FlatGradients:
    """Manages the flat tensor for the gradients of a bucket, and reallocates it if other objects reference it.

    Args:
        params: the parameters, all with one dtype and on one device.
        layouts: the strides of each parameter's gradient.
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
        """Returns whether `gradients` are exactly the parts of the flat tensor, in order."""
        return (
            list(map(_data_ptr, gradients)) == self._addresses
            and self._whole is not None
            and list(map(_stride, gradients)) == self._strides
            and not any(gradient.requires_grad or gradient.is_conj() or gradient.is_neg() for gradient in gradients)
        )

    def whole(self) -> torch.Tensor:
        """Returns the flat tensor; it must exist, as it does after `has` returned True."""
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
        if _storage_use_count is None:
            return [*self._references, 0]  # longer than any other result, so the memory is never reused
        in_use = _storage_use_count(self._whole.untyped_storage()._cdata)
        return [in_use, *map(sys.getrefcount, self._parts)]
