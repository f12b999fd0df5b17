"""The numbers that a program records, such as its loss, and the first of them that is not finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import SupportsFloat

from paceline import _core
from paceline.record.names import EventKind
from paceline.record.recorder import known_rank
from paceline.record.spans import note_event, number_of
from paceline.record.steps import STEPS

_FINITE, _TOLD = "finite", "told"

_states: dict[str, str] = {}  # what is known of each name
listeners: list[Callable[[Mapping[str, float]], None]] = []
"""Called with the numbers of each `log`; `sinks.py` adds to them."""


def log(**values: SupportsFloat) -> None:
    """Records numbers by their names, such as the loss and the learning rate, with the current step.

    Numbers and tensors of one element are converted to a double at once. For a tensor on a GPU that waits until the GPU
    has computed it; a loop that must not wait logs such values every few steps. A warning names the first NaN or
    infinity of a number that was finite before, and of a loss.

        paceline.log(loss=loss, lr=scheduler.get_last_lr()[0])

    Raises:
        TypeError: a value is no number and no tensor of one element.
    """
    passed_on: dict[str, float] = {}
    for name, value in values.items():
        detach = getattr(value, "detach", None)
        try:
            number = float(value if detach is None else detach())
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"paceline.log: {name} is a {type(value).__name__} that cannot be one number ({error}); pass a number "
                "or a tensor of one element"
            ) from None
        _core.record_value(number_of(name), number)
        passed_on[name] = number
        state = _states.get(name)
        if math.isfinite(number):
            if state is None:
                _states[name] = _FINITE
        elif state is _FINITE or (state is None and "loss" in name.lower()):
            _states[name] = _TOLD
            _tell_not_finite(name, number)
    for listener in listeners:
        listener(passed_on)


def _tell_not_finite(name: str, number: float) -> None:
    step = STEPS.number
    note_event(int(EventKind.NOT_FINITE), name, step)
    rank = known_rank()
    where = "" if rank is None else f"rank {rank}: "
    when = f"in step {step}" if step else "before the first step"
    warnings.warn(
        f"{where}{name} is {number} {when}, for the first time. Look at this rank's batch of that step; if all ranks "
        "say so, the parameters were spoiled before, or the learning rate is too high",
        RuntimeWarning,
        stacklevel=3,
    )
