"""What a module and a machine must have to train data parallel."""

from __future__ import annotations

import os

import torch
from torch import nn

from paceline.engine.codes import DTYPE_CODES
from paceline.group.process_group import ProcessGroup


def why_not(module: nn.Module) -> Exception | None:
    """Why this module cannot be wrapped, None if it can."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_cpu:
            return ValueError(f"{name!r} is on {tensor.device}; the paceline engine works on CPU: module.cpu()")
    trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    if not trained:
        return RuntimeError(
            "no parameter of the module requires a gradient, so there is nothing to reduce; use it unwrapped"
        )
    for name, param in trained:
        if param.dtype not in DTYPE_CODES:
            return TypeError(f"parameter {name!r} is of {param.dtype}, which cannot be averaged over the ranks")
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            return TypeError(f"{name!r} makes sparse gradients, which are not reduced; build it with sparse=False")
    return None


def has_core_to_spare(group: ProcessGroup) -> bool:
    """Whether the ranks of this host leave each of their progress threads a core."""
    named = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(named) if named.isdecimal() else group.size()
    return len(os.sched_getaffinity(0)) >= ranks * (torch.get_num_threads() + 1)
