"""Arguments that several calls have: ranks, and tensors that are divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.group.base import BaseGroup
from paceline.group.buffers import Tensors, as_list, count_elements
from paceline.wording import shown

_MOST_TAG = 2**31 - 1  # the core's tags are of 32 bits


def group_rank_of(group: BaseGroup, rank: int) -> int:
    """Returns the group rank of a rank of the default group.

    Raises:
        ValueError: it is not a member of the group.
    """
    if rank not in group.ranks:
        raise ValueError(f"rank {shown(rank)} is not in {group}; its members are {group.ranks}")
    return group.ranks.index(rank)


def root_rank(
    group: BaseGroup, rank: int | None, group_rank: int | None, call: str, name: str, default: int | None = None
) -> int:
    """Returns the group rank that a call names by `rank`, which is a rank of the default group, or by `group_rank`.

    Raises:
        ValueError: both are given, neither is given and there is no `default`, or the rank is not in the group.
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


def require_root(group: BaseGroup, root: int, call: str) -> None:
    """Requires that `root` is a group rank.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= root < group.size():
        raise ValueError(
            f"rank {group.me.rank}: {call}: the root is group rank {root}; {group} has ranks 0 to {group.size() - 1}"
        )


def require_peer(group: BaseGroup, peer: int, call: str, name: str) -> None:
    """Requires that the group rank `peer` is another rank of the group.

    Raises:
        ValueError: it is this rank, or not in the group.
    """
    if not 0 <= peer < group.size():
        raise ValueError(
            f"rank {group.me.rank}: {call}: {name} is group rank {peer}; {group} has ranks 0 to {group.size() - 1}"
        )
    if peer == group.rank():
        raise ValueError(
            f"{call}: {name} is rank {group.ranks[peer]}, this one; a rank sends nothing to itself, use tensor.copy_()"
        )


def checked_tag(tag: int, call: str) -> int:
    """Returns `tag`.

    Raises:
        ValueError: it is negative, or has more than 31 bits.
    """
    if not 0 <= tag <= _MOST_TAG:
        raise ValueError(f"{call}: tag is {tag}; it must be from 0 to {_MOST_TAG}")
    return tag


def parts_by_rank(whole: torch.Tensor, count: int, group: BaseGroup, call: str, name: str) -> list[torch.Tensor]:
    """Returns the ranks' parts of `whole`, of `count` elements each, as one-dimensional views.

    Raises:
        ValueError: `whole` has another number of elements, or is not contiguous.
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
    whole: torch.Tensor, sizes: Sequence[int] | None, group: BaseGroup, call: str, name: str
) -> list[torch.Tensor]:
    """Returns the ranks' parts of `whole` along its first dimension.

    Rank r's part has `sizes[r]` rows. If `sizes` is None, all parts have the same number of rows.

    Raises:
        ValueError: the sizes do not add up to the number of rows, the rows cannot be divided evenly, or there are none
            since the tensor has no dimensions.
    """
    if whole.dim() == 0:
        raise ValueError(
            f"rank {group.me.rank}: {call}: {name} has no dimensions, so no rows to divide among {group.size()} ranks; "
            f"give it one: {name}.view(1)"
        )
    rows = whole.shape[0]
    if sizes is None:
        if rows % group.size():
            raise ValueError(
                f"rank {group.me.rank}: {call}: {name} has {rows} rows, which cannot be divided evenly "
                f"among {group.size()} ranks; give {name}_split_sizes"
            )
        sizes = [rows // group.size()] * group.size()
    if len(sizes) != group.size() or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"rank {group.me.rank}: {call}: {name}_split_sizes is {list(sizes)}; it needs {group.size()} with the sum "
            f"{rows}, none of them negative"
        )
    return list(whole.detach().split(list(sizes)))


def lists_by_rank(lists: Sequence[Tensors], group: BaseGroup, call: str, argument: str) -> list[list[torch.Tensor]]:
    """Returns `lists`, one entry for each rank, each as a list of tensors.

    Raises:
        ValueError: the number of entries is not that of the ranks.
        TypeError: an entry is neither a tensor nor a list of tensors.
    """
    if isinstance(lists, torch.Tensor) or len(lists) != group.size():
        seen = type(lists).__name__ if isinstance(lists, torch.Tensor) else f"{len(lists)} entries"
        raise ValueError(f"{call}: {argument} needs one entry for each of the {group.size()} ranks, not {seen}")
    return [as_list(each, f"{call}: {argument}") for each in lists]


def require_counts(lists: Sequence[list[torch.Tensor]], count: int, group: BaseGroup, call: str, argument: str) -> None:
    """Requires that each of `lists` has `count` elements.

    Raises:
        ValueError: one of them has another number of elements.
    """
    for at, each in enumerate(lists):
        if count_elements(each) != count:
            raise ValueError(
                f"rank {group.me.rank}: {call}: entry {at} of {argument} has {count_elements(each)} elements; "
                f"all must have {count}"
            )
