"""All ranks of a pipeline agree on the batch before anything passes between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.group.process_group import ProcessGroup
from paceline.parallel.pipeline.plan import Plan

_NOT_ASKED, _MISSING, _UNEVEN = -1, -2, -3


def agreed_rows(
    group: ProcessGroup, plan: Plan, inputs: Sequence[torch.Tensor] | None, targets: Sequence[torch.Tensor] | None
) -> int:
    """Returns how many samples the batch has; all ranks call this.

    Args:
        inputs: the batch on the rank of the first stage, None on others.
        targets: what the rank of the last stage compares with; None on others, and if no loss is wanted.

    Raises:
        ValueError: on all ranks, if a batch is missing or the sizes do not fit.
    """
    mine = torch.tensor([_rows(inputs), _rows(targets)], device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    group.all_gather(everyone, mine)
    first, last = plan.ranks_of_stages[0], plan.ranks_of_stages[-1]
    rows, wanted = int(everyone[first][0]), int(everyone[last][1])
    for name, rank, seen in (("inputs", first, rows), ("targets", last, wanted)):
        who = f"{group.me}: pipeline: the {name} on rank {group.ranks[rank]}, which has the {_WHICH[name]} stage,"
        if seen == _MISSING:
            raise ValueError(
                f"{who} are missing; pass a tensor, or a tuple of tensors, with the samples along dimension 0"
            )
        if seen == _UNEVEN:
            raise ValueError(
                f"{who} are no tensors with the same number of samples along dimension 0; pass such tensors"
            )
    if wanted not in (_NOT_ASKED, rows):
        raise ValueError(
            f"{group.me}: pipeline: rank {group.ranks[first]} passes inputs of {rows} samples, and rank "
            f"{group.ranks[last]} targets of {wanted}; pass the same batch on both"
        )
    if rows < plan.micro_batches:
        raise ValueError(
            f"{group.me}: pipeline: a batch of {rows} samples cannot be divided into {plan.micro_batches} "
            "micro-batches; each needs at least one sample"
        )
    return rows


_WHICH = {"inputs": "first", "targets": "last"}


def _rows(batch: Sequence[torch.Tensor] | None) -> int:
    if batch is None:
        return _NOT_ASKED
    if not batch:
        return _MISSING
    if not all(isinstance(each, torch.Tensor) and each.ndim and each.size(0) == batch[0].size(0) for each in batch):
        return _UNEVEN
    return batch[0].size(0)
