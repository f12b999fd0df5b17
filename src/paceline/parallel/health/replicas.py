"""Compares what the ranks hold, by digests, and says which of them differ, since when and in what."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.errors import ReplicasDifferError
from paceline.group.default import given_or_default
from paceline.group.process_group import ProcessGroup
from paceline.parallel.health.contents import Part, optimizers_part, random_part, tensors_part
from paceline.parallel.health.pace import Pace, StepClock
from paceline.parallel.health.steps import OPTIMIZER_STEPS
from paceline.parallel.health.verdict import Difference, Digests, compare, differing_names
from paceline.parallel.tracked_tensors import TrackedTensors, collect_tracked
from paceline.record.names import EventKind
from paceline.record.spans import note_event

FIRST_STEP = 10
LEAST_STEPS = 100  # from one check to the next, unless the user has said how many
_SHARE = 0.001  # of the time of a step


@dataclass(frozen=True)
class _Gathered:
    """What all ranks have said in one check: their digests of each part, and the largest cost and shortest step."""

    parts: dict[str, list[Digests]]
    cost_s: float
    step_s: float


class ReplicaCheck:
    """Compares the replicas of a module every now and then, at the end of a backward, and warns on the first rank.

    At that time every rank has applied the same steps and is in the same call, whatever forwards some have made alone.
    Parameters and the optimizers that have made steps are compared. Random states are not, since ranks may have seeds
    of their own, and evaluations on one rank.

    Args:
        module: the module, of which tensors with ignored names are left out.
        ignored: names of tensors that may differ.
        group: the ranks.
        every: the number of steps from one check to the next; None if it depends on what a check costs.
        with_buffers: whether buffers are the same on all ranks at the end of a backward.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: Iterable[str],
        group: ProcessGroup,
        every: int | None,
        *,
        with_buffers: bool = False,
    ) -> None:
        self.compares_optimizers = True  # not where ranks have made different numbers of steps
        self._module = module
        self._ignored = list(ignored)
        self._with_buffers = with_buffers
        self._group = group
        self._clock = StepClock()
        self._pace = Pace(_SHARE, first=FIRST_STEP, least=LEAST_STEPS, fixed=every)
        self._equal_step = 0  # the latest step in which all ranks were equal
        self._told: set[tuple[str, tuple[int, ...]]] = set()
        OPTIMIZER_STEPS.follow()

    def end(self, step: int) -> None:
        """Ends a backward whose gradients were averaged over all ranks, the `step`-th one.

        Raises:
            CollectiveError: a call failed.
        """
        started = time.perf_counter()
        self._clock.tick(started)
        if not self._pace.is_due(step):
            return
        parts = self._parts()
        cost_s = time.perf_counter() - started
        gathered = gather_digests(parts, self._group, cost_s, self._clock.shortest_s)
        self._pace.plan(step, gathered.cost_s, gathered.step_s)
        self._judge(step, parts, gathered)

    def _parts(self) -> dict[str, Part]:
        tracked = collect_tracked(self._module, self._ignored)
        params = _parameters(self._module, tracked)
        optimizers = OPTIMIZER_STEPS.seen() if self.compares_optimizers else []
        return {
            "parameters": tensors_part(params),
            "buffers": tensors_part(tracked.buffers if self._with_buffers else {}),
            "values of the optimizer": optimizers_part(optimizers, params),
        }

    def _judge(self, step: int, parts: Mapping[str, Part], gathered: _Gathered) -> None:
        sides = {part: found for part, digests in gathered.parts.items() if (found := compare(digests)) is not None}
        if not sides:
            self._equal_step = step
            self._told.clear()
            return
        new = {part: each for part, each in sides.items() if (part, each.odd) not in self._told}
        self._told.update((part, each.odd) for part, each in new.items())
        if not new:
            return
        differences = find_differences(gathered, parts, self._group)
        for each in differences:
            note_event(int(EventKind.DIFFERENCE), each.names[0], step, self._group.ranks[each.sides.odd[0]])
        if self._group.rank() == 0:
            warnings.warn(self._text(step, differences), RuntimeWarning, stacklevel=2)

    def _text(self, step: int, differences: Sequence[Difference]) -> str:
        told = "; ".join(each.describe(self._group.ranks) for each in differences)
        before = f"at step {self._equal_step} all were equal" if self._equal_step else "this was the first comparison"
        return (
            f"the replicas of {type(self._module).__name__} are not the same since step {step}: {told} ({before}). "
            "The ranks train different models. Go on from a checkpoint, and look for what only some ranks do, such as "
            "writing to parameters, another learning rate, or clipping under a condition; if there is nothing, suspect "
            "a machine. paceline.check_replicas(model, optimizer) in every step finds the first one"
        )


def check_replicas(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    group: ProcessGroup | None = None,
    *,
    random_state: bool = False,
    raises: bool = True,
) -> list[Difference]:
    """Compares the parameters and buffers of `module`, and the state of its optimizer, over all ranks.

    Every rank must call it at the same place. Buffers are equal only right after they were copied, unless the forwards
    of all ranks change them in the same way: running statistics differ after a forward in training mode.

    Args:
        module: the module, wrapped or not.
        optimizer: its optimizer, or several, whose settings and state are compared as well.
        group: the ranks; the default group if None.
        random_state: whether the states of torch's and Python's random numbers on the CPU are compared.
        raises: whether a difference is an error.

    Returns:
        The parts of the state that differ, the same on every rank; an empty list if none does.

    Raises:
        ReplicasDifferError: replicas differ; on every rank, with the ranks that differ and what differs first.

    Example::

        paceline.check_replicas(model, optimizer)  # the first tensor that differs is named on every rank
    """
    inner = module
    wrapped_for = getattr(module, "process_group", None)
    if isinstance(wrapped_for, ProcessGroup) and isinstance(module.module, nn.Module):
        inner, group = module.module, group or wrapped_for
    group = given_or_default(group)
    tracked = collect_tracked(inner)
    params = _parameters(inner, tracked)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    parts = {
        "parameters": tensors_part(params),
        "buffers": tensors_part(tracked.buffers),
        "values of the optimizer": optimizers_part(optimizers, params),
        "random states": random_part() if random_state else Part({}),
    }
    gathered = gather_digests(parts, group)
    differences = find_differences(gathered, parts, group)
    if differences and raises:
        told = "; ".join(each.describe(group.ranks) for each in differences)
        raise ReplicasDifferError(
            f"rank {group.me.rank}: the replicas of {type(inner).__name__} are not the same: {told}. Look for what "
            "only some ranks do between the latest call that found no difference and this one",
            ranks=tuple(sorted({group.ranks[rank] for each in differences for rank in each.sides.odd})),
        )
    return differences


def gather_digests(
    parts: Mapping[str, Part], group: ProcessGroup, cost_s: float = 0.0, step_s: float = 0.0
) -> _Gathered:
    """Sends this rank's digests of all parts to all ranks, and what its check costs."""
    digests = [part.digests() for part in parts.values()]
    times = torch.tensor([cost_s, step_s], dtype=torch.float64, device="cpu").view(torch.int64)
    numbers = [number for each in digests for number in (each.shape, each.total)]
    mine = torch.cat([times, torch.tensor(numbers, dtype=torch.int64, device="cpu")])
    everyones = [torch.empty_like(mine) for _ in group.ranks]
    group.all_gather(everyones, mine)
    said = [each[2:].tolist() for each in everyones]
    costs = torch.stack([each[:2].view(torch.float64) for each in everyones])
    by_part = {part: [Digests(*each[2 * at : 2 * at + 2]) for each in said] for at, part in enumerate(parts)}
    return _Gathered(by_part, float(costs[:, 0].max()), float(costs[:, 1].min()))


def find_differences(gathered: _Gathered, parts: Mapping[str, Part], group: ProcessGroup) -> list[Difference]:
    """Returns what differs; all ranks call this after `gather_digests`, and exchange names where something does."""
    differences = []
    for part, digests in gathered.parts.items():
        sides = compare(digests)
        if sides is not None:
            said = group.all_gather_bytes(json.dumps(dict(parts[part].values)).encode())
            everyones: list[dict[str, int]] = [json.loads(each) for each in said]
            names = differing_names(sides, everyones)
            differences.append(Difference(part, sides, tuple(names), len(everyones[sides.sides[0][0]])))
    return differences


def _parameters(module: nn.Module, tracked: TrackedTensors) -> dict[str, nn.Parameter]:
    """Returns the tracked parameters in the order of the module."""
    wanted = tracked.trained | tracked.frozen
    return {name: param for name, param in module.named_parameters() if name in wanted}
