"""Makes the replicas of a module alike before training starts."""

from __future__ import annotations

from paceline.group.process_group import ProcessGroup
from paceline.parallel.agreement import require_same_module
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.conditions import rank_facts, reduces_during_backward, warn_of_too_many_threads
from paceline.parallel.tracked_tensors import TrackedTensors


def start_alike(
    tracked: TrackedTensors,
    compared: dict[str, object],
    overlap: bool | None,
    problem: Exception | None,
    group: ProcessGroup,
    with_buffers: bool,
) -> bool:
    """Compares the ranks' modules and arguments, and copies rank 0's parameters to all ranks.

    Args:
        tracked: the module's tensors.
        compared: the wrapper's arguments that must be the same on every rank, by name.
        overlap: whether this rank asks for reduction during backward; None if it depends on the ranks' cores.
        problem: why this rank cannot wrap its module, if so.
        group: the ranks.
        with_buffers: whether the buffers are copied too.

    Returns:
        Whether gradients are reduced during backward, which is the same on every rank.

    Raises:
        CollectiveMismatchError: modules or arguments differ; raised on every rank.
    """
    facts = rank_facts(group, overlap, on_cpu=any(tensor.is_cpu for tensor in tracked.trained.values()))
    everyones = require_same_module(tracked, compared, facts, problem, group)
    warn_of_too_many_threads(everyones, group)
    # By `data`, which counts no writes: no backward is to come yet, and whoever shares the parameters between the ranks
    # of a host (SharedModelOptimizer) would take a write to them for one that a single rank has made.
    broadcast_tensors([tensor.data for tensor in tracked.tensors(with_buffers)], group)
    return reduces_during_backward(everyones)
