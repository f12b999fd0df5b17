"""What buckets of gradients are rounded to between hosts, and what that has lost so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from paceline.engine.codes import QUANTISED_TYPES
from paceline.group.process_group import ProcessGroup
from paceline.group.wire import Wire, WireKind, checked_kind


class BucketWires:
    """Keeps a `Wire` for each bucket.

    Args:
        kind: of all; None if gradients are not rounded.
    """

    def __init__(self, kind: WireKind | None) -> None:
        self.kind = kind
        self._wires: dict[int, tuple[Sequence[str], Wire]] = {}

    def of(self, at: int, names: Sequence[str]) -> Wire | None:
        """Returns the wire of the bucket with the number `at`, whose gradients are those of `names`.

        Where other gradients were in the bucket before, since ranks leave some out, it begins anew.
        """
        if self.kind is None:
            return None
        known = self._wires.get(at)
        if known is None or known[0] != names:
            known = self._wires[at] = (names, Wire(self.kind))
        return known[1]


def choose_wire(
    wire: WireKind | None, group: ProcessGroup, excluded: Mapping[str, bool], params: Mapping[str, nn.Parameter]
) -> tuple[WireKind | None, Exception | None]:
    """Returns what gradients are rounded to between hosts, and why this module's cannot be rounded if they cannot.

    Args:
        wire: the argument of the wrapper. Without it the group's own wire counts, if that goes with all else.
        group: the ranks.
        excluded: arguments that do not go with `wire`, and whether they are given.
        params: what the module trains.

    Raises:
        ValueError: there is no such wire, or it does not go with another argument.
    """
    given = [name for name, is_given in excluded.items() if is_given]
    if wire is not None and given:
        raise ValueError(
            f"wire={wire!r} was given with {given[0]}, which decides how gradients travel; give one of them"
        )
    chosen = group.wire if wire is None else checked_kind(wire)
    unfit = [name for name, each in params.items() if each.dtype not in QUANTISED_TYPES or not each.is_cpu]
    if wire is None:
        return (None if given or unfit else chosen), None
    if not unfit:
        return chosen, None
    of, types = params[unfit[0]], ", ".join(str(dtype).removeprefix("torch.") for dtype in QUANTISED_TYPES)
    return chosen, TypeError(
        f"wire={wire!r}: the parameter {unfit[0]!r} is of {of.dtype} on {of.device}; only gradients of {types} on the "
        "CPU are rounded. Convert the module, or leave wire out"
    )
