"""The outer parameters, fragment by fragment: what is exchanged of them, and what the result does to them.

Which buffers of a module are averaged with the last fragment, and which remain each rank's own.

What ranks exchange of a fragment: the outer gradient, and with the last fragment the values of buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.train.diloco.exchange_mailbox import Tensors


def averaged_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Returns the buffers whose mean over the ranks means something: those with fractions that a state_dict has.

    A buffer that is not in the state_dict is computed anew by each rank, and a mean of counters would mean nothing.
    """
    kept = module.state_dict(keep_vars=True)
    found = {id(each): each for name, each in module.named_buffers() if name in kept and each.is_floating_point()}
    return list(found.values())


def other_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Returns the other buffers of the state_dict, such as counters, of which rank 0's become those of all."""
    kept, averaged = module.state_dict(keep_vars=True), {id(each) for each in averaged_buffers(module)}
    found = {id(each): each for name, each in module.named_buffers() if name in kept and id(each) not in averaged}
    return list(found.values())


def flat_buffers(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the values of buffers in a flat tensor of single precision on the CPU; double where one has that."""
    widest = torch.float64 if any(each.dtype == torch.float64 for each in buffers) else torch.float32
    parts = [each.detach().to("cpu", widest).reshape(-1) for each in buffers]
    return torch.cat(parts) if parts else torch.zeros(0)


@torch.no_grad()
def set_buffer_values(buffers: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Sets buffers to values in the form of `flat`."""
    at = 0
    for each in buffers:
        each.copy_(values[at : at + each.numel()].view(each.shape))
        at += each.numel()


def cut(sizes: Sequence[int], fragments: int) -> list[range]:
    """Returns the indices of each fragment: runs of about the same total size, none of them empty.

    >>> cut([6, 1, 1, 4, 4], 3)
    [range(0, 1), range(1, 4), range(4, 5)]
    """
    ends = list(accumulate(sizes))
    cuts = [0]
    for fragment in range(1, fragments):
        least, most = cuts[-1] + 1, len(sizes) - (fragments - fragment)
        wanted = ends[-1] * fragment / fragments
        cuts.append(min(range(least, most + 1), key=lambda at: abs(ends[at - 1] - wanted)))
    return [range(first, stop) for first, stop in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]


class OuterParameters(nn.Module):
    """Copies of parameters as they were when each was last exchanged; they have equal bits on all ranks.

    They are on the CPU, from where they are sent, and in single precision at least.

    Args:
        params: the parameters, which the ranks train.
        fragments: how many parts they are exchanged in.
    """

    def __init__(self, params: Sequence[nn.Parameter], fragments: int) -> None:
        super().__init__()
        self.copies = nn.ParameterList([_copy_of(param) for param in params])
        self._pairs = list(zip(params, self.copies, strict=True))
        self._fragments = cut([param.numel() for param in params], fragments)
        self._lengths = [sum(copy.numel() for _, copy in self._pairs_of(each)) for each in range(fragments)]
        self._dtypes = [_widest(copy.dtype for _, copy in self._pairs_of(each)) for each in range(fragments)]

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Returns the parameters, each with its copy."""
        return self._pairs

    def is_covered_by(self, optimizer: Optimizer) -> bool:
        """Returns whether the optimizer has all the copies."""
        has = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return all(id(copy) in has for copy in self.copies)

    @torch.no_grad()
    def difference(self, fragment: int) -> torch.Tensor:
        """Returns the outer gradient, a flat tensor: the outer parameters less those that this rank has trained."""
        parts = [(copy - param.to(copy)).reshape(-1) for param, copy in self._pairs_of(fragment)]
        return torch.cat([part.to(self._dtypes[fragment]) for part in parts])

    def zeros(self, fragment: int) -> torch.Tensor:
        """Returns zeros of the form of `difference`."""
        return torch.zeros(self._lengths[fragment], dtype=self._dtypes[fragment])

    @torch.no_grad()
    def step(self, fragment: int, gradient: torch.Tensor, optimizer: Optimizer | None) -> None:
        """Updates the outer parameters of a fragment with a mean of outer gradients; without an optimizer to the mean.

        Those of other fragments have no gradient, so that the optimizer leaves them as they are.
        """
        at = 0
        for _, copy in self._pairs_of(fragment):
            part = gradient[at : at + copy.numel()].view(copy.shape).to(copy.dtype)
            at += copy.numel()
            if optimizer is None:
                copy.sub_(part)
            else:
                copy.grad = part
        if optimizer is not None:
            optimizer.step()
            for _, copy in self._pairs:
                copy.grad = None

    @torch.no_grad()
    def trained(self, fragment: int) -> list[torch.Tensor]:
        """Returns a fragment as this rank has trained it so far."""
        return [param.to(copy, copy=True) for param, copy in self._pairs_of(fragment)]

    @torch.no_grad()
    def outer(self, fragment: int) -> list[torch.Tensor]:
        """Returns the outer parameters of a fragment as they are now."""
        return [copy.detach().clone() for _, copy in self._pairs_of(fragment)]

    @torch.no_grad()
    def reset(self, fragment: int, mix: float, before: Sequence[torch.Tensor] | None = None) -> None:
        """Sets the rank's parameters to the outer ones, and adds what it has trained since `before`.

        Args:
            fragment: which parameters.
            mix: the share of `before` in place of the outer parameters.
            before: the rank's parameters from which on training counts; as they are now if None.
        """
        for at, (param, copy) in enumerate(self._pairs_of(fragment)):
            now = param.to(copy)
            then = now if before is None else before[at]
            start = torch.lerp(copy, then, mix) if mix else copy
            param.copy_(start if before is None else start + (now - then))

    def _pairs_of(self, fragment: int) -> list[tuple[nn.Parameter, nn.Parameter]]:
        indices = self._fragments[fragment]
        return self._pairs[indices.start : indices.stop]


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes)


def _copy_of(param: nn.Parameter) -> nn.Parameter:
    widest = torch.promote_types(param.dtype, torch.float32)
    return nn.Parameter(param.detach().to("cpu", widest, copy=True, memory_format=torch.contiguous_format))


class Content:
    """Takes what is exchanged from a module, and puts means of buffers into it.

    Args:
        module: the model.
        outer: its outer parameters.
        fragments: the number of fragments.
    """

    def __init__(self, module: nn.Module, outer: OuterParameters, fragments: int) -> None:
        self._outer = outer
        self._buffers = averaged_buffers(module)
        self._last = fragments - 1

    def offer(self, fragment: int) -> Tensors:
        """Returns what this rank gives to an exchange."""
        return [self._outer.difference(fragment), *self._values_with(fragment)]

    def blank(self, fragment: int) -> Tensors:
        """Returns zeros of the same form."""
        return [self._outer.zeros(fragment), *(each.zero_() for each in self._values_with(fragment))]

    def set_buffers(self, mean: Tensors) -> None:
        """Sets the buffers to their means, if those are in the result of an exchange."""
        _, *values = mean
        for each in values:
            set_buffer_values(self._buffers, each)

    def _values_with(self, fragment: int) -> Tensors:
        return [flat_buffers(self._buffers)] if self._buffers and fragment == self._last else []
