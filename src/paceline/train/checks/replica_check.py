"""Compares what the ranks hold, by digests, and says which of them differ, since when and in what.

Which ranks differ from the others, judged by digests of what each of them holds, and what is said of it.

What a replica consists of, as digests by name: parameters, buffers, the state of optimizers, random numbers.
"""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.comm.group.default import given_or_default
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import note_event
from paceline.errors import ReplicasDifferError, and_more
from paceline.train.checks.optimizer_steps import OPTIMIZER_STEPS, CheckInterval, StepClock
from paceline.train.module_tensors import TrackedTensors, collect_tracked, digest_of, digest_of_text

_MOST_NAMED = 8  # ranks


@dataclass(frozen=True)
class RankDigests:
    """The digests of one part of the state on one rank.

    Attributes:
        shape: a digest of what there is; only ranks with the same are compared, and 0 says that there is nothing.
        total: a digest of the values.
    """

    shape: int
    total: int


@dataclass(frozen=True)
class DisagreeingRanks:
    """Ranks that hold different values: the larger side first, and all of equal size if nobody has the majority."""

    sides: tuple[tuple[int, ...], ...]

    @property
    def has_majority(self) -> bool:
        """Returns whether one side is larger than every other."""
        return len(self.sides[0]) > len(self.sides[1])

    @property
    def odd(self) -> tuple[int, ...]:
        """Returns the ranks that are not of the majority, all if there is none."""
        sides = self.sides[1:] if self.has_majority else self.sides
        return tuple(sorted(rank for side in sides for rank in side))

    def describe(self, ranks: Sequence[int]) -> str:
        """Returns who differs from whom; `ranks` are the numbers by which the ranks are named."""
        if self.has_majority:
            odd, majority = self.odd, self.sides[0]
            return f"{_named(odd, ranks)} {'differs' if len(odd) == 1 else 'differ'} from {_named(majority, ranks)}"
        if all(len(side) == 1 for side in self.sides):
            return f"{_named(self.odd, ranks)} differ, and no majority says which is right"
        sides = "; ".join(_named(side, ranks) for side in self.sides)
        return f"ranks differ, and no majority says which are right: {sides}"


def compare_digests(everyones: Sequence[RankDigests]) -> DisagreeingRanks | None:
    """Returns which ranks differ in one part of the state, None if none do that can be compared.

    >>> compare_digests([RankDigests(1, 7), RankDigests(1, 7), RankDigests(1, 8)]).describe([0, 1, 2])
    'rank 2 differs from ranks 0 and 1'
    >>> compare_digests([RankDigests(1, 7), RankDigests(1, 8)]).describe([0, 1])
    'ranks 0 and 1 differ, and no majority says which is right'
    """
    by_shape: dict[int, dict[int, list[int]]] = {}
    for rank, each in enumerate(everyones):
        if each.shape:
            by_shape.setdefault(each.shape, {}).setdefault(each.total, []).append(rank)
    different = [values for values in by_shape.values() if len(values) > 1]
    if not different:
        return None
    largest = max(different, key=lambda values: sum(map(len, values.values())))
    return DisagreeingRanks(
        tuple(tuple(side) for side in sorted(largest.values(), key=lambda side: (-len(side), side)))
    )


def differing_names(sides: DisagreeingRanks, everyones: Sequence[Mapping[str, int]]) -> list[str]:
    """Returns the names whose digests are not the same on all ranks of these sides, in their order."""
    members = [everyones[rank] for side in sides.sides for rank in side]
    return [name for name in members[0] if any(each.get(name) != members[0][name] for each in members[1:])]


@dataclass(frozen=True)
class ReplicaDifference:
    """A part of the state that is not the same on all ranks.

    Attributes:
        part: what differs, such as "parameters".
        sides: which ranks differ, by their numbers in the group.
        names: what differs first, and so on, in the order of the module.
        count: how many names there are.
    """

    part: str
    sides: DisagreeingRanks
    names: tuple[str, ...]
    count: int

    def describe(self, ranks: Sequence[int]) -> str:
        """Returns who differs from whom and in what; `ranks` are the numbers by which the ranks are named."""
        return (
            f"{self.sides.describe(ranks)} in {len(self.names)} of {self.count} {self.part}, first in {self.names[0]}"
        )


def _named(numbers: Sequence[int], ranks: Sequence[int]) -> str:
    names = [ranks[number] for number in numbers]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > _MOST_NAMED:
        return f"ranks {and_more(names, _MOST_NAMED)}"
    return f"ranks {', '.join(map(str, names[:-1]))} and {names[-1]}"


_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class StateDigests:
    """A part of the state: the digest of each of its values, by name and in an order that is the same on every rank."""

    values: Mapping[str, int]

    def digests(self) -> RankDigests:
        """Returns digests of all names, and of all values."""
        if not self.values:
            return RankDigests(0, 0)
        return RankDigests(
            digest_of_text("\n".join(self.values)), digest_of_text(" ".join(map(str, self.values.values())))
        )


def tensors_part(named: Mapping[str, torch.Tensor]) -> StateDigests:
    """Returns the digests of tensors; those without memory of their own, such as sparse ones, are left out."""
    return StateDigests({repr(name): digest_of([each]) for name, each in named.items() if _has_memory(each)})


def optimizers_part(optimizers: Iterable[torch.optim.Optimizer], params: Mapping[str, nn.Parameter]) -> StateDigests:
    """Returns the digests of the settings of the optimizers of these parameters, and of their states for them.

    With ZeRO, each rank has an optimizer or states of some parameters only, and so names of its own. Ranks with
    different names are not compared.
    """
    names = {id(param): name for name, param in params.items()}
    places = {key: at for at, key in enumerate(names)}
    own: list[tuple[list[int], str, torch.optim.Optimizer]] = []
    for optimizer in optimizers:
        ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
        if any(each in names for each in ids):
            own.append((sorted(places[each] for each in ids if each in names), type(optimizer).__name__, optimizer))
    values: dict[str, int] = {}
    for number, (_, kind, optimizer) in enumerate(sorted(own, key=lambda each: each[:2])):
        values |= _optimizer_values(kind if number == 0 else f"{kind} {number + 1}", optimizer, names)
    return StateDigests(values)


def random_part() -> StateDigests:
    """Returns the digests of the states of torch's and Python's random numbers on the CPU."""
    return StateDigests(
        {
            "torch's random state": digest_of([torch.get_rng_state()]),
            "Python's random state": digest_of_text(repr(random.getstate())),
        }
    )


def _optimizer_values(kind: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, int]:
    values: dict[str, int] = {}
    for at, group in enumerate(optimizer.param_groups):
        where = f"of {kind}'s group {at}" if len(optimizer.param_groups) > 1 else f"of {kind}"
        for key in sorted(key for key in group if key not in ("params", "param_names")):
            _add(values, f"{key!r} {where}", group[key])
        for param in group["params"]:
            state = optimizer.state.get(param, {}) if id(param) in names else {}
            for key in sorted(map(str, state)):
                _add(values, f"{key!r} of {kind} for {names[id(param)]!r}", state.get(key))
    return values


def _add(values: dict[str, int], name: str, value: object) -> None:
    """Adds the digest of a tensor or a plain value; others may have a representation that says nothing."""
    if isinstance(value, torch.Tensor):
        if _has_memory(value):
            values[name] = digest_of([value])
    elif isinstance(value, _PLAIN) or (isinstance(value, Sequence) and all(isinstance(each, _PLAIN) for each in value)):
        values[name] = digest_of_text(repr(value))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's numbers are in its own memory, and not in that of tensors which it wraps."""
    return tensor.layout is torch.strided and not tensor.is_meta and not hasattr(tensor, "__tensor_flatten__")


FIRST_STEP = 10
LEAST_STEPS = 100  # from one check to the next, unless the user has said how many
_SHARE = 0.001  # of the time of a step


@dataclass(frozen=True)
class _Gathered:
    """What all ranks have said in one check: their digests of each part, and the largest cost and shortest step."""

    parts: dict[str, list[RankDigests]]
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
        self._pace = CheckInterval(_SHARE, first=FIRST_STEP, least=LEAST_STEPS, fixed=every)
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

    def _parts(self) -> dict[str, StateDigests]:
        tracked = collect_tracked(self._module, self._ignored)
        params = _parameters(self._module, tracked)
        optimizers = OPTIMIZER_STEPS.seen() if self.compares_optimizers else []
        return {
            "parameters": tensors_part(params),
            "buffers": tensors_part(tracked.buffers if self._with_buffers else {}),
            "values of the optimizer": optimizers_part(optimizers, params),
        }

    def _judge(self, step: int, parts: Mapping[str, StateDigests], gathered: _Gathered) -> None:
        sides = {
            part: found for part, digests in gathered.parts.items() if (found := compare_digests(digests)) is not None
        }
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

    def _text(self, step: int, differences: Sequence[ReplicaDifference]) -> str:
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
) -> list[ReplicaDifference]:
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
        "random states": random_part() if random_state else StateDigests({}),
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
    parts: Mapping[str, StateDigests], group: ProcessGroup, cost_s: float = 0.0, step_s: float = 0.0
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
    by_part = {part: [RankDigests(*each[2 * at : 2 * at + 2]) for each in said] for at, part in enumerate(parts)}
    return _Gathered(by_part, float(costs[:, 0].max()), float(costs[:, 1].min()))


def find_differences(
    gathered: _Gathered, parts: Mapping[str, StateDigests], group: ProcessGroup
) -> list[ReplicaDifference]:
    """Returns what differs; all ranks call this after `gather_digests`, and exchange names where something does."""
    differences = []
    for part, digests in gathered.parts.items():
        sides = compare_digests(digests)
        if sides is not None:
            said = group.all_gather_bytes(json.dumps(dict(parts[part].values)).encode())
            everyones: list[dict[str, int]] = [json.loads(each) for each in said]
            names = differing_names(sides, everyones)
            differences.append(ReplicaDifference(part, sides, tuple(names), len(everyones[sides.sides[0][0]])))
    return differences


def _parameters(module: nn.Module, tracked: TrackedTensors) -> dict[str, nn.Parameter]:
    """Returns the tracked parameters in the order of the module."""
    wanted = tracked.trained | tracked.frozen
    return {name: param for name, param in module.named_parameters() if name in wanted}
