"""The calls that average a module's gradients over the ranks.

What buckets of gradients are rounded to between hosts, and what that has lost so far.

Detects that ranks read the same batches, without a collective of its own.

In the first few steps, a vector with an element for each rank is sent along with the gradients. Each rank writes a
digest of its inputs to its own element, and zeros to the others, so the average contains all ranks' digests.

Parameters whose gradients are averaged apart from all others (`delay_all_reduce_named_params`).
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from paceline.comm.engine.codes import QUANTISED_TYPES, ReduceOp
from paceline.comm.group.compression import Wire, WireKind, checked_kind
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.errors import and_more
from paceline.train.autograd_graph import NO_BACKWARD, find_first_tensors, running_backward
from paceline.train.checks.module_checks import ModuleChecks
from paceline.train.ddp.buckets import Countdown
from paceline.train.ddp.comm_hook import CommHook, HookedWork
from paceline.train.ddp.gradient_buckets import (
    BucketGradients,
    GradientBuckets,
    GradientMemory,
    average_sparse,
    have_aliases,
)
from paceline.train.ddp.optimizer_in_backward import step_params, take_over_steps
from paceline.train.module_tensors import TrackedTensors, broadcast_tensors, collect_tracked
from paceline.train.training_events import RecordedBuckets


class BucketWires:
    """Keeps a `Wire` for each bucket.

    Args:
        kind: of all; None if gradients are not rounded.
    """

    def __init__(self, kind: WireKind | None) -> None:
        self.kind = kind
        self._wires: dict[int, tuple[Sequence[str], Wire]] = {}

    def of(self, at: int, names: Sequence[str]) -> Wire | None:
        """Returns the wire of the bucket with the number `at`, whose gradients are those of `names`.

        Where other gradients were in the bucket before, since ranks leave some out, it begins anew.
        """
        if self.kind is None:
            return None
        known = self._wires.get(at)
        if known is None or known[0] != names:
            known = self._wires[at] = (names, Wire(self.kind))
        return known[1]


def choose_wire(
    wire: WireKind | None, group: ProcessGroup, excluded: Mapping[str, bool], params: Mapping[str, nn.Parameter]
) -> tuple[WireKind | None, Exception | None]:
    """Returns what gradients are rounded to between hosts, and why this module's cannot be rounded if they cannot.

    Args:
        wire: the argument of the wrapper. Without it the group's own wire counts, if that goes with all else.
        group: the ranks.
        excluded: arguments that do not go with `wire`, and whether they are given.
        params: what the module trains.

    Raises:
        ValueError: there is no such wire, or it does not go with another argument.
    """
    given = [name for name, is_given in excluded.items() if is_given]
    if wire is not None and given:
        raise ValueError(
            f"wire={wire!r} was given with {given[0]}, which decides how gradients travel; give one of them"
        )
    chosen = group.wire if wire is None else checked_kind(wire)
    unfit = [name for name, each in params.items() if each.dtype not in QUANTISED_TYPES or not each.is_cpu]
    if wire is None:
        return (None if given or unfit else chosen), None
    if not unfit:
        return chosen, None
    of, types = params[unfit[0]], ", ".join(str(dtype).removeprefix("torch.") for dtype in QUANTISED_TYPES)
    return chosen, TypeError(
        f"wire={wire!r}: the parameter {unfit[0]!r} is of {of.dtype} on {of.device}; only gradients of {types} on the "
        "CPU are rounded. Convert the module, or leave wire out"
    )


_LOOKS = 3  # the number of steps whose digests must agree for a warning
_DIGEST_BITS = 20  # exact in float32, also when divided by the number of ranks
_MOST_NAMED = 8  # ranks in the warning
_MOST_BYTES = 1 << 16  # the part of each tensor that is hashed


class SameBatches:
    """Compares the ranks' batches in the first steps; afterwards `is_over` is true.

    Args:
        group: the ranks.
        on_cpu: whether the gradients are on the CPU. Batches are not compared on a GPU, which would have to wait.
    """

    def __init__(self, group: ProcessGroup, on_cpu: bool) -> None:
        self.is_over = group.size() == 1 or not on_cpu
        self._group = group
        self._mine: int | None = None
        self._sent: torch.Tensor | None = None
        self._seen: list[list[float]] = []

    def look(self, inputs: object) -> None:
        """Computes the digest of a forward's inputs."""
        self._mine = digest(inputs)

    def drop_digest(self) -> None:
        """Drops the digest, on a rank that has no inputs in this step."""
        self._mine = None

    def add_to(self, memory: GradientMemory, dtype: torch.dtype) -> None:
        """Adds the digest to gradients of `dtype`, if that dtype can represent it exactly."""
        if self.is_over or dtype not in (torch.float32, torch.float64):
            return
        self._sent = torch.zeros(self._group.size(), dtype=dtype, device="cpu")
        # Without a digest, the rank sends a number that no other rank sends.
        self._sent[self._group.rank()] = -1 - self._group.rank() if self._mine is None else self._mine
        memory.pieces += (self._sent.data_ptr(), self._sent.nbytes)
        memory.tensors = [*memory.tensors, self._sent]
        memory.count += len(self._sent)

    def arrive(self) -> None:
        """Reads the digests after the gradients that they were added to were averaged."""
        if self._sent is None:
            return
        self._seen.append(self._sent.tolist())
        self._sent = None
        if len(self._seen) == _LOOKS:
            self.is_over = True
            self._tell()

    def _tell(self) -> None:
        histories = list(zip(*self._seen, strict=True))
        me = self._group.rank()
        if min(histories[me]) < 0:
            return
        alike = [rank for rank, history in enumerate(histories) if history == histories[me]]
        if len(alike) > 1 and alike[0] == me:
            ranks = [self._group.ranks[rank] for rank in alike]
            named = and_more(ranks, _MOST_NAMED) if len(ranks) > _MOST_NAMED else _listed(ranks)
            warnings.warn(
                f"ranks {named} read the same batches: their first {_LOOKS} "
                "batches were equal, so they compute the same gradients, and training gains nothing from the "
                "additional ranks. Give the DataLoader sampler=paceline.DistributedSampler(dataset), or use another "
                "seed for the batches on each rank",
                stacklevel=2,
            )


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def digest(inputs: object) -> int | None:
    """Returns a digest of the tensors in `inputs`, None if each is constant or one is not on the CPU."""
    hashed = hashlib.blake2b(digest_size=8)
    tells = False
    for tensor in find_first_tensors(inputs):
        if tensor is None:
            break
        if tensor.layout is not torch.strided or tensor.is_nested or not tensor.is_cpu:
            return None
        flat = tensor.detach().reshape(-1)[: _MOST_BYTES // tensor.element_size()].contiguous()
        flat = flat.resolve_conj().resolve_neg()
        data = ctypes.string_at(flat.data_ptr(), flat.nbytes)
        hashed.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        hashed.update(data)
        tells = tells or (len(flat) > 1 and data != data[: flat.element_size()] * len(flat))
    return int.from_bytes(hashed.digest(), "big") % (1 << _DIGEST_BITS) if tells else None


class GradientAverager:
    """Averages `gradients` over the ranks of `group`, in place, when the caller says so.

    Args:
        gradients: the gradients of a module.
        group: the ranks.
        compares_batches: whether digests of the ranks' batches are sent along with the first gradients.
        checks: looks at the gradients, and is told of each averaged backward.
        wire: what gradients are rounded to between hosts, with error feedback; None if they are not. Digests of batches
            would not survive it, and are not sent then.
    """

    def __init__(
        self,
        gradients: GradientBuckets,
        group: ProcessGroup,
        *,
        compares_batches: bool = True,
        checks: ModuleChecks | None = None,
        wire: WireKind | None = None,
    ) -> None:
        # - How gradients are averaged
        self._gradients = gradients
        self._group = group
        self._checks = checks
        self.comm_hook: CommHook | None = None  # the hook that averages instead of the engine
        self.scale = 1.0  # the factor of averages: within `join`, not all ranks may count
        on_cpu = all(param.is_cpu for param in gradients.params)
        self.same_batches = SameBatches(group, on_cpu=compares_batches and on_cpu and wire is None)
        self._wires = BucketWires(wire)

        # - The calls of this backward
        self._recorded = RecordedBuckets("ddp")
        self._in_flight: list[
            tuple[int, Work | HookedWork, GradientMemory]
        ] = []  # on the group's progress thread, or with the hook
        self._over: list[GradientMemory] = []  # averaged, but not written back yet

    def note_ready(self, at: int) -> None:
        """Records that a bucket's gradients are there, before it may be its turn."""
        self._recorded.ready(at, self._gradients.buckets[at].nbytes)

    def start_full(self, countdown: Countdown) -> None:
        """Starts the buckets that are full now, strictly in their order."""
        self._gradients.fill_absent()
        while countdown.may_start():
            if not self._start_early(countdown.next):
                return  # a hook of the user's has removed a gradient, which is an error when backward ends
            countdown.next += 1

    def _start_early(self, at: int) -> bool:
        """Averages a bucket on the group's progress thread; if a gradient is missing, does nothing and returns False.

        A gradient that shares its memory is averaged in a copy, since the backward goes on and may still read it.
        """
        gradients = self._gradients.active[at]
        if gradients is None:
            return True
        memory = gradients.collect(copy_shared=True)
        if memory is None:
            return False
        self._start(at, gradients, memory, async_op=True)
        return True

    def average_from(self, first: int, copy_shared: bool) -> bool:
        """Averages the buckets from `first` on, unless gradients are missing, and waits for all calls.

        Args:
            first: the number of the first bucket that was not started early.
            copy_shared: whether gradients that share memory with other tensors are averaged in copies.

        Returns:
            False if gradients are missing.
        """
        active = enumerate(self._gradients.active)
        rest = [(at, gradients) for at, gradients in active if at >= first and gradients is not None]
        memories = _collect(rest, copy_shared)
        sparse = self._gradients.active_sparse()
        if len(memories) != len(rest) or any(param.grad is None for param in sparse):
            self._finish()
            if self._checks is not None:
                self._checks.forget()
            return False
        if have_aliases(memories):
            # On another rank, with a batch of another size, they may not, and all ranks must reduce the same.
            memories = _collect(rest, copy_shared=True)
        if self.comm_hook is None and memories and not self.same_batches.is_over:
            self.same_batches.add_to(memories[-1], rest[-1][1].dtype)
        for (at, gradients), memory in zip(rest, memories, strict=True):
            self._start(at, gradients, memory, async_op=False)
        if sparse:
            if self._checks is not None:
                self._checks.look_at(self._gradients.active_sparse_names(), [param.grad for param in sparse])
            average_sparse(sparse, self._group, self.scale)
            if self._checks is not None:
                self._checks.averaged([param.grad for param in sparse])
        self._finish()
        if self._checks is not None:
            self._checks.end()
        return True

    def average_present(self, copy_shared: bool) -> None:
        """Averages the gradients that any rank has; zeros stand in on the ranks that do not have them.

        Without any gradient it makes no call: a rank that computes the gradients of other tensors, with
        `torch.autograd.grad`, may do so alone.
        """
        if self._gradients.any_present():
            with self._gradients.only_present(self._group):
                self.average_from(0, copy_shared)

    def abandon(self) -> None:
        """Gives up the calls in flight after an error, without waiting for them."""
        self._in_flight.clear()
        self._over.clear()
        if self._checks is not None:
            self._checks.forget()
        self._recorded.forget()
        self.same_batches.is_over = True

    def _start(self, at: int, gradients: BucketGradients, memory: GradientMemory, async_op: bool) -> None:
        work: Work | HookedWork | None
        self.note_ready(at)
        if self._checks is not None:
            self._checks.look(gradients.names, memory.tensors, memory.pieces, gradients.dtype_code)
        self._recorded.sent(at)
        if self.comm_hook is None:
            work = self._group.all_reduce_memory(
                memory.pieces,
                memory.tensors,
                gradients.dtype_code,
                memory.count,
                ReduceOp.AVG,
                async_op,
                self._wires.of(at, gradients.names),
            )
        else:
            work = self.comm_hook.start(at, self._gradients.is_last(at), gradients, memory)
        if work is None:
            self._recorded.done(at)
            self._over.append(memory)
        else:
            self._in_flight.append((at, work, memory))

    def _finish(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        over, self._over = self._over, []
        for at, work, memory in in_flight:
            work.wait()
            self._recorded.done(at)
            over.append(memory)
        if not self.same_batches.is_over:
            self.same_batches.arrive()
        for memory in over:
            if self.scale != 1:
                torch._foreach_mul_(memory.tensors, self.scale)
            memory.write_back()


def _collect(buckets: Sequence[tuple[int, BucketGradients]], copy_shared: bool) -> list[GradientMemory]:
    """Returns the memory of the buckets in which no gradient is missing."""
    return [memory for _, gradients in buckets if (memory := gradients.collect(copy_shared)) is not None]


class DelayedParameters:
    """Averages the gradients of some parameters at the end of each backward that reaches `trigger`.

    They are averaged in one call for each dtype, whatever buckets the other parameters have, and also within `no_sync`.
    A parameter without a gradient contributes zeros, as in torch.

    Args:
        module: the module that has the parameters.
        named: pairs of a name and a parameter.
        trigger: a parameter that requires a gradient.
        group: the ranks.
    """

    def __init__(
        self, module: nn.Module, named: Iterable[tuple[str, nn.Parameter]], trigger: nn.Parameter, group: ProcessGroup
    ) -> None:
        self.params = dict(named)
        trained = {name: param for name, param in self.params.items() if param.requires_grad}
        sparse = collect_tracked(module).sparse & set(trained)
        tracked = TrackedTensors(trained, frozen={}, buffers={}, sparse=sparse, ignored=frozenset())
        self._gradients = GradientBuckets(tracked, [sys.maxsize])
        self._averager = GradientAverager(self._gradients, group, compares_batches=False)
        self._stepped = take_over_steps(trained)
        self._group = group
        self._task = NO_BACKWARD  # the autograd engine's number of the backward that reached the trigger
        self._hook = trigger.register_hook(self._begin)

    def broadcast(self) -> None:
        """Copies rank 0's parameters to all ranks."""
        broadcast_tensors(list(self.params.values()), self._group)

    def close(self) -> None:
        """Takes the hook off the trigger; idempotent."""
        self._hook.remove()

    @eager
    def _begin(self, _: torch.Tensor) -> None:
        task = running_backward()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @eager
    def _end(self) -> None:
        self._task = NO_BACKWARD
        for param, zero in zip(self._gradients.params, self._gradients.zeros(), strict=True):
            if param.grad is None:
                param.grad = zero
        self._averager.average_from(0, copy_shared=True)
        step_params(self._stepped)


def require_delayed(
    module: nn.Module, named: Iterable[tuple[str, nn.Parameter]] | None, trigger: nn.Parameter | None
) -> list[tuple[str, nn.Parameter]]:
    """Returns the pairs of `named`, and requires that they are the module's.

    Raises:
        ValueError: a parameter does not have the name that it is paired with, or the trigger requires no gradient.
    """
    if named is None or trigger is None:
        return []
    pairs = list(named)
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, param in pairs:
        if known.get(name) is not param:
            raise ValueError(
                f"delay_all_reduce_named_params has a pair of {name!r} and a parameter that is not the module's "
                "parameter of this name; give pairs from module.named_parameters()"
            )
    if not trigger.requires_grad:
        raise ValueError(
            "param_to_hook_all_reduce requires no gradient, so the delayed parameters would never be averaged; give a "
            "parameter that is trained"
        )
    return pairs
