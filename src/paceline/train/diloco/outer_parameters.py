"""OuterParameters and ExchangeContent: the tensors that ranks exchange.

An exchange averages the outer gradient of a fragment. The exchange of the last fragment additionally averages
floating-point buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.train.diloco.exchanges import Tensors


def other_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Returns the integer and boolean buffers in the state_dict, such as counters, which are copied from rank 0."""
    return [buffer for buffer in _saved_buffers(module) if not buffer.is_floating_point()]


def _saved_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Returns the buffers in the state_dict; each rank recomputes all others."""
    saved = module.state_dict(keep_vars=True)
    return list({id(buffer): buffer for name, buffer in module.named_buffers() if name in saved}.values())


def flat_buffers(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates buffers into a flat CPU tensor of dtype float32, or float64 if any buffer is float64."""
    widest = torch.float64 if any(buffer.dtype == torch.float64 for buffer in buffers) else torch.float32
    parts = [buffer.detach().to("cpu", widest).reshape(-1) for buffer in buffers]
    return torch.cat(parts) if parts else torch.zeros(0, device="cpu")


def cut(sizes: Sequence[int], fragments: int) -> list[range]:
    """Divides indices into fragments: non-empty runs of consecutive indices with about the same total size.

    >>> cut([6, 1, 1, 4, 4], 3)
    [range(0, 1), range(1, 4), range(4, 5)]
    """
    ends = list(accumulate(sizes))
    cuts = [0]
    for fragment in range(1, fragments):
        least, most = cuts[-1] + 1, len(sizes) - (fragments - fragment)
        wanted = ends[-1] * fragment / fragments
        cuts.append(min(range(least, most + 1), key=lambda end: abs(ends[end - 1] - wanted)))
    return [range(first, stop) for first, stop in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]


class OuterParameters(nn.Module):
    """Holds the outer parameters: copies of the parameters as of their last exchange, bitwise equal on all ranks.

    The copies are sent from CPU memory and have at least float32 precision.
    """

    def __init__(self, params: Sequence[nn.Parameter], fragments: int) -> None:
        super().__init__()
        self.copies = nn.ParameterList([_copy_of(param) for param in params])
        self._pairs = list(zip(params, self.copies, strict=True))
        self._fragments = cut([param.numel() for param in params], fragments)
        copies = [[copy for _, copy in self._pairs_of(fragment)] for fragment in range(fragments)]
        self._lengths = [sum(copy.numel() for copy in part) for part in copies]
        self._dtypes = [reduce(torch.promote_types, (copy.dtype for copy in part)) for part in copies]

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Returns pairs of a parameter and its outer copy."""
        return self._pairs

    @torch.no_grad()
    def difference(self, fragment: int) -> torch.Tensor:
        """Computes the outer gradient as a flat tensor: the outer parameters minus this rank's parameters."""
        parts = [(copy - param.to(copy)).reshape(-1) for param, copy in self._pairs_of(fragment)]
        return torch.cat([part.to(self._dtypes[fragment]) for part in parts])

    def zeros(self, fragment: int) -> torch.Tensor:
        """Returns zeros with the dtype and length of `difference`."""
        return torch.zeros(self._lengths[fragment], dtype=self._dtypes[fragment], device="cpu")

    @torch.no_grad()
    def step(self, fragment: int, gradient: torch.Tensor, optimizer: Optimizer | None) -> None:
        """Updates a fragment's outer parameters with the mean outer gradient; without `optimizer`, subtracts the mean.

        The optimizer does not change other fragments, because their parameters have no gradient.
        """
        copies = [copy for _, copy in self._pairs_of(fragment)]
        for copy, part in zip(copies, gradient.split([copy.numel() for copy in copies]), strict=True):
            own = part.view(copy.shape).to(copy.dtype)
            if optimizer is None:
                copy.sub_(own)
            else:
                copy.grad = own
        if optimizer is not None:
            optimizer.step()
            for _, copy in self._pairs:
                copy.grad = None

    @torch.no_grad()
    def trained(self, fragment: int) -> list[torch.Tensor]:
        """Returns copies of this rank's parameters in a fragment."""
        return [param.to(copy, copy=True) for param, copy in self._pairs_of(fragment)]

    @torch.no_grad()
    def outer(self, fragment: int) -> list[torch.Tensor]:
        """Returns copies of the outer parameters in a fragment."""
        return [copy.detach().clone() for _, copy in self._pairs_of(fragment)]

    @torch.no_grad()
    def reset(self, fragment: int, mix: float, before: Sequence[torch.Tensor] | None = None) -> None:
        """Sets this rank's parameters to the outer parameters plus the rank's progress since `before`.

        Args:
            fragment: the index of the fragment.
            mix: the weight of `before` relative to the outer parameters, from 0 to 1.
            before: this rank's parameters at the start of the exchange; if None, the current parameters.
        """
        for index, (param, copy) in enumerate(self._pairs_of(fragment)):
            now = param.to(copy)
            then = now if before is None else before[index]
            start = torch.lerp(copy, then, mix) if mix else copy
            param.copy_(start if before is None else start + (now - then))

    def _pairs_of(self, fragment: int) -> list[tuple[nn.Parameter, nn.Parameter]]:
        indices = self._fragments[fragment]
        return self._pairs[indices.start : indices.stop]


def _copy_of(param: nn.Parameter) -> nn.Parameter:
    widest = torch.promote_types(param.dtype, torch.float32)
    return nn.Parameter(param.detach().to("cpu", widest, copy=True, memory_format=torch.contiguous_format))


class ExchangeContent:
    """Collects the tensors for an exchange from a module, and copies buffer means back into the module.

    Only floating-point buffers are averaged, because the mean of counters is not meaningful.
    """

    def __init__(self, module: nn.Module, outer: OuterParameters, fragments: int) -> None:
        self._outer = outer
        self._buffers = [buffer for buffer in _saved_buffers(module) if buffer.is_floating_point()]
        self._last = fragments - 1

    def offer(self, fragment: int) -> Tensors:
        """Returns the tensors that this rank contributes to a fragment's exchange."""
        return [self._outer.difference(fragment), *self._values_with(fragment)]

    def blank(self, fragment: int) -> Tensors:
        """Returns zeros with the dtypes and shapes of `offer`."""
        return [self._outer.zeros(fragment), *(values.zero_() for values in self._values_with(fragment))]

    @torch.no_grad()
    def set_buffers(self, mean: Tensors) -> None:
        """Sets the buffers to their means if the result includes them."""
        for values in mean[1:]:
            parts = values.split([buffer.numel() for buffer in self._buffers])
            for buffer, part in zip(self._buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    def _values_with(self, fragment: int) -> Tensors:
        return [flat_buffers(self._buffers)] if self._buffers and fragment == self._last else []
