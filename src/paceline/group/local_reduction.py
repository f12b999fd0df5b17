"""Reduces the tensors of one process in the order in which the engine reduces those of several ranks.

The order is a pairwise tree. If the number of tensors of each process is a power of two, reducing them here and then
reducing the results over the ranks is the same tree as one over as many ranks with one tensor each, so the result is
bitwise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline import _core
from paceline.engine.codes import DTYPE_CODES
from paceline.group.reduce_op import PremulSum, ReduceOp, Reduction

_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_COMBINE: dict[ReduceOp, _Combine] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_OF_BOOLEANS: dict[ReduceOp, _Combine] = dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), torch.logical_or)
_OF_BOOLEANS |= dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), torch.logical_and)
_OF_BOOLEANS[ReduceOp.BXOR] = torch.logical_xor

# PyTorch cannot add, multiply or compare unsigned integers wider than a byte, so they are viewed as signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def reduce_locally(tensors: Sequence[torch.Tensor], op: Reduction, call: str) -> torch.Tensor:
    """Reduces `tensors`, of one type and number of elements, to a new one of the first's shape and on its device.

    The result of float16 and bfloat16 tensors is in float32, so that the caller rounds once, in the end. For AVG it is
    the sum, and for PREMUL_SUM the sum of the multiplied tensors.

    Raises:
        TypeError: the reduction is not defined for their type.
        ValueError: the tensors differ in type or number of elements.
    """
    first = tensors[0]
    code = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
    for at, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype or tensor.numel() != first.numel():
            raise ValueError(
                f"{call}: tensor {at} has {tensor.numel()} elements of {tensor.dtype}, tensor 0 has {first.numel()} of "
                f"{first.dtype}; all tensors of a process must be alike"
            )
    if not isinstance(code, ReduceOp):
        raise TypeError(f"{call}: op must be a paceline.ReduceOp or a paceline.PremulSum, not {type(op).__name__}")
    if first.dtype not in DTYPE_CODES or not _core.reduces(DTYPE_CODES[first.dtype], code):
        raise TypeError(f"{call}: {code.name} is not defined for {first.dtype}; convert the tensors first")
    wide = [
        _scaled(tensor.detach(), op).to(first.device, _WIDE.get(first.dtype, first.dtype)).reshape(first.shape)
        for tensor in tensors
    ]
    if first.dtype in _SIGNED:
        return _reduce_unsigned(wide, code)
    combine = (_OF_BOOLEANS if first.dtype is torch.bool else _COMBINE)[code]
    return _tree(wide, combine) if len(wide) > 1 else wide[0].clone()


def divided(total: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the average of `count` tensors whose sum is `total`; for integers its fraction is dropped."""
    if total.is_floating_point() or total.is_complex():
        return total / count
    average = total.to("cpu", memory_format=torch.contiguous_format, copy=True)
    if average.numel():
        address = average.data_ptr()
        _core.reduce(address, [address], average.numel(), DTYPE_CODES[average.dtype], ReduceOp.AVG, count)
    return average.to(total.device)


def _scaled(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    return tensor.clone().mul_(op.factor) if isinstance(op, PremulSum) else tensor


def _reduce_unsigned(tensors: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    dtype = tensors[0].dtype
    signed = [tensor.contiguous().view(_SIGNED[dtype]) for tensor in tensors]
    # With the highest bit flipped, signed numbers have the order of the unsigned ones.
    turned = torch.iinfo(_SIGNED[dtype]).min if op in (ReduceOp.MIN, ReduceOp.MAX) else 0
    return _tree([tensor ^ turned for tensor in signed], _COMBINE[op]).bitwise_xor_(turned).view(dtype)


def _tree(tensors: Sequence[torch.Tensor], combine: _Combine) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    half = 1 << (len(tensors) - 1).bit_length() - 1
    return combine(_tree(tensors[:half], combine), _tree(tensors[half:], combine))
