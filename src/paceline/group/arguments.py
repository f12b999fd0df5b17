"""What several calls' arguments mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from paceline.engine.failures import Member
    from paceline.group.process_group import ProcessGroup


class Ranked(Protocol):
    """A group, as far as it matters here."""

    @property
    def me(self) -> Member:
        """This rank, by its number in the default group."""
        ...

    def size(self) -> int:
        """The number of ranks."""
        ...


def group_rank_of(group: ProcessGroup, rank: int) -> int:
    """The group rank of a rank of the default group.

    Raises:
        ValueError: it is not a member.
    """
    if rank not in group.ranks:
        raise ValueError(f"rank {rank} is not in {group}; its members are {group.ranks}")
    return group.ranks.index(rank)


def root_rank(
    group: ProcessGroup, rank: int | None, group_rank: int | None, call: str, name: str, default: int | None = None
) -> int:
    """The group rank that is meant by `rank`, one of the default group, or by `group_rank`.

    Raises:
        ValueError: both are given, or neither and there is no `default`, or it is not in the group.
    """
    if rank is not None and group_rank is not None:
        raise ValueError(f"{call}: {name} and group_{name} exclude each other; give one of them")
    if rank is not None:
        return group_rank_of(group, rank)
    if group_rank is None:
        group_rank = default
    if group_rank is None:
        raise ValueError(f"{call} needs {name} (a rank of the default group) or group_{name}")
    if not 0 <= group_rank < group.size():
        raise ValueError(f"{call}: group_{name} is {group_rank}; {group} has ranks 0 to {group.size() - 1}")
    return group_rank


def parts_by_rank(whole: torch.Tensor, count: int, group: Ranked, call: str, name: str) -> list[torch.Tensor]:
    """The ranks' parts of `whole`, of `count` elements each, as one-dimensional views.

    Raises:
        ValueError: it has another number of elements, or is not contiguous.
    """
    if whole.numel() != count * group.size():
        raise ValueError(
            f"rank {group.me.rank}: {call}: {name} has {whole.numel()} elements; with {group.size()} ranks of {count} "
            f"elements it must have {count * group.size()}"
        )
    if not whole.is_contiguous():
        raise ValueError(f"rank {group.me.rank}: {call}: {name} is not contiguous; pass {name}.contiguous()")
    flat = whole.detach().view(-1)
    return [flat[r * count : (r + 1) * count] for r in range(group.size())]


def rows_by_rank(
    whole: torch.Tensor, sizes: Sequence[int] | None, group: Ranked, call: str, name: str
) -> list[torch.Tensor]:
    """The ranks' parts of `whole` along its first dimension: `sizes[r]` rows each, or with None equally many.

    Raises:
        ValueError: the sizes do not add up to the number of rows, or that cannot be shared evenly.
    """
    rows = whole.shape[0] if whole.dim() else 0
    if sizes is None:
        if rows % group.size():
            raise ValueError(
                f"rank {group.me.rank}: {call}: {name} has {rows} rows, which {group.size()} ranks cannot share "
                f"evenly; give {name}_split_sizes"
            )
        sizes = [rows // group.size()] * group.size()
    if len(sizes) != group.size() or sum(sizes) != rows:
        raise ValueError(
            f"rank {group.me.rank}: {call}: {name}_split_sizes is {list(sizes)}; it needs {group.size()} with the sum "
            f"{rows}"
        )
    return list(whole.detach().split(list(sizes)))
