"""What ranks exchange of a fragment: the outer gradient, and with the last fragment the values of buffers."""

from __future__ import annotations

from torch import nn

from paceline.parallel.local.buffers import averaged_buffers, flat, set_to
from paceline.parallel.local.desk import Tensors
from paceline.parallel.local.fragments import OuterParameters


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
            set_to(self._buffers, each)

    def _values_with(self, fragment: int) -> Tensors:
        return [flat(self._buffers)] if self._buffers and fragment == self._last else []
