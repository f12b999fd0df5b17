"""How messages of errors name ranks and their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.engine.channel import HeaderFields
from paceline.engine.codes import NO_REDUCTION, ReduceOp, dtype_name
from paceline.schedule.steps import Operation
from paceline.wording import and_more

_MOST_NAMED = 4  # ranks in one list
_MOST_SAID = 8  # different calls in a message


def describe_call(header: HeaderFields) -> str:
    """Returns a description of a call as its rank made it, such as "all_reduce(float32, 4 elements, SUM) as call 7"."""
    sequence, operation, dtype, reduce_op, root, count = header
    if operation == 0:
        return "no call"
    parts = []
    if operation != Operation.BARRIER:
        parts.append(dtype_name(dtype))
    # With some engines, the ranks do not know each other's numbers of elements in an all_to_all.
    if count or operation not in (Operation.BARRIER, Operation.ALL_TO_ALL):
        parts.append(f"{count} elements")
    if reduce_op != NO_REDUCTION:
        parts.append(ReduceOp(reduce_op).name)
    if root >= 0:
        parts.append(f"root {root}")
    return f"{Operation(operation)}({', '.join(parts)}) as call {sequence}"


def names(members: Sequence[object]) -> str:
    """Lists the members, shortened if there are many."""
    return and_more(members, _MOST_NAMED)


def by_what(what: Mapping[int, str], members: Sequence[object], form: str) -> str:
    """Says what is known of each rank, by its group rank; ranks of which the same is known are named together."""
    alike: dict[str, list[object]] = {}
    for at, said in what.items():
        alike.setdefault(said, []).append(members[at])
    told = [form.format(names(ranks), said) for said, ranks in alike.items()]
    more = f"; and {len(told) - _MOST_SAID} more" if len(told) > _MOST_SAID else ""
    return "; ".join(told[:_MOST_SAID]) + more
