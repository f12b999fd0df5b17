"""What `explain` prints: the algorithm that a group uses for a call."""

from __future__ import annotations

from paceline.engine.algorithms import ALGORITHM_VARIABLE
from paceline.engine.channel import Channel
from paceline.engine.native.scheduled import ScheduledChannel
from paceline.schedule.cost import explain_text
from paceline.schedule.steps import Operation


def explain_choice(channel: Channel, backend: str, size: int, name: str, nbytes: int) -> str:
    """Returns which algorithm a group of `size` ranks on `channel` uses for a call of `nbytes`, and why.

    Raises:
        ValueError: there is no operation of that name.
    """
    try:
        operation = Operation.named(name)
    except ValueError as error:
        raise ValueError(f"explain: {error}") from None
    if isinstance(channel, ScheduledChannel):
        return explain_text(channel.choose(operation, nbytes))
    call = f"{operation} of {nbytes:,} bytes on {size} ranks"
    if not backend.endswith("paceline"):
        return f"{call}: the library of {backend!r} chooses\n"
    return (
        f"{call}, 1 host\n\n"
        "-> direct: every rank reads the others' parts out of shared memory, so nothing is passed on.\n\n"
        f"An algorithm runs here only when it is forced (algorithm=, or {ALGORITHM_VARIABLE}).\n"
    )
