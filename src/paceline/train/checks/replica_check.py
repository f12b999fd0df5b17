"""ReplicaCheck: compares the replicas' digests; reports which ranks and values differ, and when they last agreed.

A replica consists of parameters, buffers, optimizer states, and the states of random number generators.
"""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from paceline.comm.group.default import given_or_default
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import note_event
from paceline.errors import ReplicasDifferError, and_more
from paceline.train.checks.device_values import DeviceDigests
from paceline.train.checks.optimizer_steps import OPTIMIZER_STEPS, CheckInterval, StepClock
from paceline.train.module_tensors import TrackedTensors, collect_tracked, digest_of, digest_of_text

_MOST_NAMED = 8  # the maximum number of ranks that a message lists


@dataclass(frozen=True)
class RankDigests:
    """The digests of one part of the state on one rank. Ranks are compared only if their values have equal names."""

    shape: int  # a digest of the names of the values, or 0 if there are no values
    total: int  # a digest of the values


@dataclass(frozen=True)
class DisagreeingRanks:
    """Ranks with different values, grouped into sides, the largest first. The ranks on a side have equal values."""

    sides: tuple[tuple[int, ...], ...]

    @property
    def has_majority(self) -> bool:
        """Returns True if one side is larger than every other side."""
        return len(self.sides[0]) > len(self.sides[1])

    @property
    def odd(self) -> tuple[int, ...]:
        """Returns the ranks outside the majority, or all ranks if there is no majority."""
        sides = self.sides[1:] if self.has_majority else self.sides
        return tuple(sorted(rank for side in sides for rank in side))

    def describe(self, ranks: Sequence[int]) -> str:
        """Formats the differing ranks as text; `ranks` are the global ranks of the group's members."""
        if self.has_majority:
            odd, majority = self.odd, self.sides[0]
            verb = "differs" if len(odd) == 1 else "differ"
            return f"{named_ranks(odd, ranks)} {verb} from {named_ranks(majority, ranks)}"
        if all(len(side) == 1 for side in self.sides):
            return f"{named_ranks(self.odd, ranks)} differ, and there is no majority"
        sides = "; ".join(named_ranks(side, ranks) for side in self.sides)
        return f"ranks differ, and there is no majority: {sides}"


def compare_digests(everyones: Sequence[RankDigests]) -> DisagreeingRanks | None:
    """Returns the ranks that differ in one part of the state; None if all comparable ranks are equal.

    >>> compare_digests([RankDigests(1, 7), RankDigests(1, 7), RankDigests(1, 8)]).describe([0, 1, 2])
    'rank 2 differs from ranks 0 and 1'
    >>> compare_digests([RankDigests(1, 7), RankDigests(1, 8)]).describe([0, 1])
    'ranks 0 and 1 differ, and there is no majority'
    """
    by_shape: dict[int, dict[int, list[int]]] = {}
    for rank, digests in enumerate(everyones):
        if digests.shape:
            by_shape.setdefault(digests.shape, {}).setdefault(digests.total, []).append(rank)
    different = [values for values in by_shape.values() if len(values) > 1]
    if not different:
        return None
    largest = max(different, key=lambda values: sum(map(len, values.values())))
    return DisagreeingRanks(
        tuple(tuple(side) for side in sorted(largest.values(), key=lambda side: (-len(side), side)))
    )


def differing_names(sides: DisagreeingRanks, everyones: Sequence[Mapping[str, int]]) -> list[str]:
    """Returns, in order, the names of tensors whose digests differ between the given sides of ranks."""
    first, *others = [everyones[rank] for side in sides.sides for rank in side]
    return [name for name in first if any(other.get(name) != first[name] for other in others)]


@dataclass(frozen=True)
class ReplicaDifference:
    """A part of the state that differs between ranks."""

    part: str  # the name of the part, such as "parameters"
    sides: DisagreeingRanks  # group ranks
    names: tuple[str, ...]  # the names of the values that differ, in the module's order
    count: int  # the total number of values in the part

    def describe(self, ranks: Sequence[int]) -> str:
        """Formats the differing ranks and values as text; `ranks` are the global ranks of the group's members."""
        return (
            f"{self.sides.describe(ranks)} in {len(self.names)} of {self.count} {self.part}, first in {self.names[0]}"
        )


def named_ranks(numbers: Sequence[int], ranks: Sequence[int]) -> str:
    """Formats group ranks, such as "ranks 2 and 5"; `ranks` are the global ranks of the group's members."""
    names = [ranks[number] for number in numbers]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > _MOST_NAMED:
        return f"ranks {and_more(names, _MOST_NAMED)}"
    return f"ranks {', '.join(map(str, names[:-1]))} and {names[-1]}"


_PLAIN = (bool, int, float, complex, str, type(None))


StatePart = dict[str, int]
"""The digests of the values in one part of the state, by name and in the same order on every rank.

Digests of CPU tensors are computed immediately. Digests of tensors on other devices are 0 until `DeviceDigests.read`
has been called.
"""


def digests_of_part(part: StatePart) -> RankDigests:
    """Returns one digest over all names and one over all values."""
    if not part:
        return RankDigests(0, 0)
    return RankDigests(digest_of_text("\n".join(part)), digest_of_text(" ".join(map(str, part.values()))))


def tensors_part(named: Mapping[str, torch.Tensor], on_devices: DeviceDigests) -> StatePart:
    """Computes the digests of tensors; skips tensors without memory of their own, such as sparse tensors."""
    values: StatePart = {}
    for name, tensor in named.items():
        _add_tensor(values, repr(name), tensor, on_devices)
    return values


def optimizers_part(
    optimizers: Iterable[torch.optim.Optimizer], params: Mapping[str, nn.Parameter], on_devices: DeviceDigests
) -> StatePart:
    """Computes digests for the settings and state of each optimizer that updates `params`.

    With ZeRO, each rank has optimizer state for only some of the parameters, so the names differ between ranks. Ranks
    with different names are not compared.
    """
    names = {id(param): name for name, param in params.items()}
    positions = {key: position for position, key in enumerate(names)}
    own: list[tuple[list[int], str, torch.optim.Optimizer]] = []
    for optimizer in optimizers:
        ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
        if found := sorted(positions[key] for key in ids if key in positions):
            own.append((found, type(optimizer).__name__, optimizer))
    values: StatePart = {}
    for number, (_, kind, optimizer) in enumerate(sorted(own, key=lambda entry: entry[:2])):
        _add_optimizer(values, kind if number == 0 else f"{kind} {number + 1}", optimizer, names, on_devices)
    return values


def random_part() -> StatePart:
    """Computes digests for the states of torch's and Python's random number generators on the CPU."""
    return {
        "torch's random state": digest_of([torch.get_rng_state()]),
        "Python's random state": digest_of_text(repr(random.getstate())),
    }


def _add_optimizer(
    values: StatePart,
    kind: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    on_devices: DeviceDigests,
) -> None:
    for number, group in enumerate(optimizer.param_groups):
        where = f"of {kind}'s group {number}" if len(optimizer.param_groups) > 1 else f"of {kind}"
        for key in sorted(key for key in group if key not in ("params", "param_names")):
            _add(values, f"{key!r} {where}", group[key], on_devices)
        for param in group["params"]:
            state = optimizer.state.get(param, {}) if id(param) in names else {}
            for key in sorted(map(str, state)):
                _add(values, f"{key!r} of {kind} for {names[id(param)]!r}", state.get(key), on_devices)


def _add(values: StatePart, name: str, value: object, on_devices: DeviceDigests) -> None:
    """Adds the digest of a tensor or a plain value; skips other objects, whose `repr` may not reflect their content."""
    if isinstance(value, torch.Tensor):
        _add_tensor(values, name, value, on_devices)
    elif isinstance(value, _PLAIN) or (isinstance(value, Sequence) and all(isinstance(item, _PLAIN) for item in value)):
        values[name] = digest_of_text(repr(value))


def _add_tensor(values: StatePart, name: str, tensor: torch.Tensor, on_devices: DeviceDigests) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta or hasattr(tensor, "__tensor_flatten__"):
        return  # the tensor has no memory of its own, or wraps other tensors
    if tensor.is_cpu:
        values[name] = digest_of([tensor])
    else:
        on_devices.add(values, name, tensor)


FIRST_STEP = 10
LEAST_STEPS = 100  # the minimum number of steps between two checks, unless the user has chosen a number
_SHARE = 0.001  # the maximum share of the training time that checks may take


@dataclass(frozen=True)
class _CheckResults:
    """The results of a check on all ranks: the digests of each part, the maximum cost, and the shortest step time."""

    parts: dict[str, list[RankDigests]]
    cost_s: float
    step_s: float


@dataclass(frozen=True)
class _EnqueuedCheck:
    """A check whose digests a device is still computing: the step, the parts of the state, and the cost so far."""

    step: int
    parts: Mapping[str, StatePart]
    on_devices: DeviceDigests
    cost_s: float


class ReplicaCheck:
    """Compares the replicas of a module at the end of some backward passes, and warns on rank 0 about differences.

    At the end of a backward pass, every rank has applied the same steps, even if some ranks have run additional
    forward passes. Digests of tensors on devices are compared at the end of the next backward pass, to avoid waiting
    for the device. The check compares parameters and the optimizers that have stepped. It does not compare random
    states, because ranks may use different seeds and may run evaluations independently.

    The tensors in `ignored` may differ. If `with_buffers` is True, buffers must be equal on all ranks when a backward
    pass ends. If `every`, the number of steps between two checks, is None, it depends on the measured cost.
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
        self.compares_optimizers = True  # False if the number of optimizer steps differs between ranks
        self._module = module
        self._ignored = list(ignored)
        self._with_buffers = with_buffers
        self._group = group
        self._clock = StepClock()
        self._pace = CheckInterval(_SHARE, first=FIRST_STEP, least=LEAST_STEPS, fixed=every)
        self._equal_step = 0  # the latest step at which all replicas were equal
        self._reported: set[tuple[str, tuple[int, ...]]] = set()
        self._enqueued: _EnqueuedCheck | None = None
        OPTIMIZER_STEPS.follow()

    def end(self, step: int) -> None:
        """Completes a backward pass whose gradients were averaged over all ranks; `step` is its index."""
        started = time.perf_counter()
        self._clock.tick(started)
        enqueued, self._enqueued = self._enqueued, None
        if enqueued is None:
            if not self._pace.is_due(step):
                return
            on_devices = DeviceDigests()
            parts = self._parts(on_devices)
            enqueued = _EnqueuedCheck(step, parts, on_devices, 0.0)
            if on_devices:
                on_devices.enqueue()
                self._enqueued = replace(enqueued, cost_s=time.perf_counter() - started)
                return
        enqueued.on_devices.read()
        cost_s = enqueued.cost_s + time.perf_counter() - started
        gathered = gather_digests(enqueued.parts, self._group, cost_s, self._clock.shortest_s)
        self._pace.plan(step, gathered.cost_s, gathered.step_s)
        self._judge(enqueued.step, enqueued.parts, gathered)

    def _parts(self, on_devices: DeviceDigests) -> dict[str, StatePart]:
        tracked = collect_tracked(self._module, self._ignored)
        params = _parameters(self._module, tracked)
        optimizers = OPTIMIZER_STEPS.seen() if self.compares_optimizers else []
        return {
            "parameters": tensors_part(params, on_devices),
            "buffers": tensors_part(tracked.buffers if self._with_buffers else {}, on_devices),
            "values of the optimizer": optimizers_part(optimizers, params, on_devices),
        }

    def _judge(self, step: int, parts: Mapping[str, StatePart], gathered: _CheckResults) -> None:
        sides = {
            part: found for part, digests in gathered.parts.items() if (found := compare_digests(digests)) is not None
        }
        if not sides:
            self._equal_step = step
            self._reported.clear()
            return
        new = {(part, found.odd) for part, found in sides.items()} - self._reported
        self._reported |= new
        if not new:
            return
        differences = find_differences(gathered, parts, self._group)
        for difference in differences:
            rank = self._group.ranks[difference.sides.odd[0]]
            note_event(int(EventKind.DIFFERENCE), difference.names[0], step, rank)
        if self._group.rank() == 0:
            warnings.warn(self._text(step, differences), RuntimeWarning, stacklevel=2)

    def _text(self, step: int, differences: Sequence[ReplicaDifference]) -> str:
        found = "; ".join(difference.describe(self._group.ranks) for difference in differences)
        before = f"at step {self._equal_step} all were equal" if self._equal_step else "this was the first comparison"
        return (
            f"the replicas of {type(self._module).__name__} differ since step {step}: {found} ({before}). The ranks "
            "train different models. Resume from a checkpoint, and look for operations that only some ranks perform, "
            "such as writing to parameters, another learning rate, or clipping under a condition; if there is "
            "nothing, suspect a machine. paceline.check_replicas(model, optimizer) in every step finds the first one"
        )


def check_replicas(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    group: ProcessGroup | None = None,
    *,
    random_state: bool = False,
    raises: bool = True,
) -> list[ReplicaDifference]:
    """Compares the parameters and buffers of `module` and the state of `optimizer` across all ranks.

    Every rank must call this function at the same point. Running statistics differ between ranks after a forward pass
    in training mode. If the module has running statistics, call this function right after its buffers have been copied.

    Args:
        module: the module, wrapped or not.
        optimizer: the module's optimizer or optimizers, whose settings and states are compared too.
        group: the process group of the ranks; if None, the default group.
        random_state: whether the states of torch's and Python's random number generators on the CPU are compared.
        raises: whether to raise an error if replicas differ.

    Returns:
        The parts of the state that differ; the list is the same on every rank.

    Raises:
        ReplicasDifferError: replicas differ; raised on every rank. The message contains the ranks and the first values
            that differ.

    Example::

        paceline.check_replicas(model, optimizer)  # every rank reports the first tensor that differs
    """
    inner = module
    wrapped_for = getattr(module, "process_group", None)
    if isinstance(wrapped_for, ProcessGroup) and isinstance(module.module, nn.Module):
        inner, group = module.module, group or wrapped_for
    group = given_or_default(group)
    tracked = collect_tracked(inner)
    params = _parameters(inner, tracked)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    on_devices = DeviceDigests()
    parts = {
        "parameters": tensors_part(params, on_devices),
        "buffers": tensors_part(tracked.buffers, on_devices),
        "values of the optimizer": optimizers_part(optimizers, params, on_devices),
        "random states": random_part() if random_state else {},
    }
    on_devices.read()
    gathered = gather_digests(parts, group)
    differences = find_differences(gathered, parts, group)
    if differences and raises:
        found = "; ".join(difference.describe(group.ranks) for difference in differences)
        raise ReplicasDifferError(
            f"rank {group.me.rank}: the replicas of {type(inner).__name__} differ: {found}. Look for operations that "
            "only some ranks perform between the latest call that found no difference and this one",
            ranks=tuple(sorted({group.ranks[rank] for found in differences for rank in found.sides.odd})),
        )
    return differences


def gather_digests(
    parts: Mapping[str, StatePart], group: ProcessGroup, cost_s: float = 0.0, step_s: float = 0.0
) -> _CheckResults:
    """Gathers the digests of all parts, the cost of the check and the step duration from all ranks."""
    digests = [digests_of_part(part) for part in parts.values()]
    times = torch.tensor([cost_s, step_s], dtype=torch.float64, device="cpu").view(torch.int64)
    numbers = [number for part in digests for number in (part.shape, part.total)]
    mine = torch.cat([times, torch.tensor(numbers, dtype=torch.int64, device="cpu")])
    everyones = [torch.empty_like(mine) for _ in group.ranks]
    group.all_gather(everyones, mine)
    gathered = torch.stack(everyones)
    costs = gathered[:, :2].contiguous().view(torch.float64)
    by_part = {
        part: [RankDigests(shape, total) for shape, total in gathered[:, first : first + 2].tolist()]
        for first, part in zip(range(2, len(mine), 2), parts, strict=True)
    }
    return _CheckResults(by_part, float(costs[:, 0].max()), float(costs[:, 1].min()))


def find_differences(
    gathered: _CheckResults, parts: Mapping[str, StatePart], group: ProcessGroup
) -> list[ReplicaDifference]:
    """Returns the parts that differ; a collective that all ranks call after `gather_digests`."""
    differences = []
    for part, digests in gathered.parts.items():
        sides = compare_digests(digests)
        if sides is not None:
            texts = group.all_gather_bytes(json.dumps(parts[part]).encode())
            everyones: list[dict[str, int]] = [json.loads(text) for text in texts]
            names = differing_names(sides, everyones)
            differences.append(ReplicaDifference(part, sides, tuple(names), len(everyones[sides.sides[0][0]])))
    return differences


def _parameters(module: nn.Module, tracked: TrackedTensors) -> dict[str, nn.Parameter]:
    """Returns the tracked parameters in the module's order."""
    names = tracked.trained.keys() | tracked.frozen.keys()
    return {name: param for name, param in module.named_parameters() if name in names}
