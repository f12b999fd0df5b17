"""FlatGradients: the gradients of a bucket on a device, as views of one flat tensor, which one call reduces.

Autograd computes each gradient in memory of its own. When the last one of a bucket is there, all are copied into a new
flat tensor, whose parts replace them. If the program keeps the gradients (`zero_grad(set_to_none=False)`, or an
accumulation within `no_sync`), autograd adds the next ones to these parts, and nothing is copied. If it discards them,
the memory is free until the next backward. A gradient that the program has saved keeps its memory and its values, since
no other backward gets that memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

_data_ptr = torch.Tensor.data_ptr
_stride = torch.Tensor.stride


class FlatGradients:
    """The flat tensor of some parameters' gradients, for as long as a gradient uses it.

    Args:
        params: the parameters, of one dtype and on one device.
        layouts: the strides of each parameter's gradient.
    """

    def __init__(self, params: Sequence[nn.Parameter], layouts: Sequence[tuple[int, ...]]) -> None:
        self._shapes = [param.shape for param in params]
        self._layouts = list(layouts)
        self._numels = [param.numel() for param in params]
        self._are_plain = [param.is_contiguous() for param in params]
        self._dtype, self._device = params[0].dtype, params[0].device
        self._storage: StorageWeakRef | None = None  # of the latest flat tensor
        self._addresses: list[int] = []
        self._strides: list[tuple[int, ...]] = []

    def has(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Returns whether these gradients are all parts of the latest flat tensor."""
        if self._storage is None or gradients[0].untyped_storage()._cdata != self._storage.cdata:
            return False
        return (
            list(map(_data_ptr, gradients)) == self._addresses
            and list(map(_stride, gradients)) == self._strides
            and not any(gradient.requires_grad or gradient.is_conj() or gradient.is_neg() for gradient in gradients)
        )

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the flat tensor that `part` is a part of."""
        return part.detach().as_strided((sum(self._numels),), (1,), 0)

    def copy_of(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copies the gradients into a new flat tensor; returns that tensor and its parts."""
        with torch.no_grad():
            whole = torch.empty(sum(self._numels), dtype=self._dtype, device=self._device)
            known = zip(whole.split(self._numels), self._shapes, self._layouts, self._are_plain, strict=True)
            # `data` removes the marks of views, whose gradients do not allow `detach_`, which programs call.
            parts = [
                (part.view(shape) if is_plain else part.as_strided(shape, layout)).data
                for part, shape, layout, is_plain in known
            ]
            torch._foreach_copy_(parts, [gradient.detach() for gradient in gradients])
        self._storage = StorageWeakRef(whole.untyped_storage())
        self._addresses = list(map(_data_ptr, parts))
        self._strides = list(map(_stride, parts))
        return whole, parts
