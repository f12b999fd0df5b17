"""Decides when the gradients of a module are averaged: while backward still computes others, or when it ends.

The Note in `backward_state.py` follows a backward from forward to the averaged gradients.

The states of a backward that averages gradients.

Note: the life of a backward
    1. `Reducer.before_forward` makes sure that the previous backward's gradients were averaged.
    2. `Reducer.expect` receives what forward returned. Autograd does not announce a backward, so every output gets a
       hook (`output_hooks.py`), and the first hook that runs shows that a backward has begun. Until then the state is
       EXPECTING.
    3. `Reducer._begin` asks the autograd engine to call `Reducer._end` after this backward, which is in the state
       BACKWARD now.
    4. Each parameter in a bucket that may be reduced early has a hook, which counts down its bucket. Full buckets are
       passed to the group's progress thread, strictly in their order, since every rank must make the same calls in the
       same order (`Averager.start_full`).
    5. `Reducer._end` reduces everything else on this thread, waits for the calls in flight, and writes the averages
       that were computed in copies back to the parameters' gradients (`Reducer._average`). The last bucket can only
       become full when backward is about to end, so it always waits for the end, and its parameters need no hooks. The
       state is IDLE again.

    If a gradient is missing when the backward ends, the others cannot be averaged, and the state is INCOMPLETE. Another
    backward may compute the missing gradient (COMPLETING), for example if two losses of one forward have a backward
    each; otherwise the next `Reducer.before_forward` raises an error.

    To average gradients again that have been averaged already does not change them. A backward that follows one whose
    gradients were averaged (of a retained graph, or of the other of two forwards) therefore averages all gradients
    again, and all are right afterwards (REPEATING). For the same reason no bucket starts early in a backward that is
    not the first one: some buckets were averaged before. If the program has cleared the gradients in between, such a
    backward may reach only some parameters; then the ranks first compare which gradients they have, as they do with
    `find_unused_parameters` (`Reducer._average_present`).

Hooks on the outputs of a forward, which show that a backward has begun.

Lets somebody else average a module's gradients: an elastic job, in which the ranks may change during a backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.group.compression import WireKind
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import CollectiveError
from paceline.train.autograd_graph import NO_BACKWARD, find_tensors, in_backward, running_backward, used_parameters
from paceline.train.checks.module_checks import ModuleChecks
from paceline.train.ddp.buckets import Countdown
from paceline.train.ddp.comm_hook import CommHook
from paceline.train.ddp.error_text import (
    AFTER_AN_ERROR,
    add_context,
    averaging_context,
    late_gradient_text,
    missing_gradient_text,
)
from paceline.train.ddp.gradient_averager import GradientAverager
from paceline.train.ddp.gradient_buckets import GradientBuckets
from paceline.train.ddp.optimizer_in_backward import step_params, take_over_steps
from paceline.train.module_tensors import TrackedTensors
from paceline.train.training_events import RecordedSteps


class BackwardState(Enum):
    """What became of the gradients that a forward asked to be averaged; see the Note above."""

    IDLE = "no forward asks for averages, or its gradients were averaged"
    EXPECTING = "there was a forward, and no backward of it has begun"
    BACKWARD = "the first backward runs"
    INCOMPLETE = "backward has ended and left parameters without a gradient"
    COMPLETING = "a later backward runs, which may compute the missing gradients"
    REPEATING = "a backward runs although gradients were averaged before"


AFTER_BEGIN = {
    BackwardState.IDLE: BackwardState.REPEATING,
    BackwardState.EXPECTING: BackwardState.BACKWARD,
    BackwardState.BACKWARD: BackwardState.COMPLETING,  # a backward within a backward, or after one that failed
    BackwardState.INCOMPLETE: BackwardState.COMPLETING,
    BackwardState.COMPLETING: BackwardState.COMPLETING,
    BackwardState.REPEATING: BackwardState.REPEATING,
}


OnBackwardBegin = Callable[[int], None]


class OutputHooks:
    """Notices each backward that reaches an output of a forward.

    Attributes:
        task: the autograd engine's number of the backward that runs, which its owner sets once it knows.
        unreached: the number of outputs that no backward has reached: their gradients may still be computed.
        in_other: whether a backward runs that has reached an output of a forward which nobody watches.
    """

    def __init__(self) -> None:
        self.task = NO_BACKWARD
        self.unreached = 0
        self.in_other = False

    def forget(self) -> None:
        """Forgets the outputs of earlier forwards and their backward."""
        self.task = NO_BACKWARD
        self.unreached = 0

    def watch(self, outputs: Iterable[torch.Tensor], begin: OnBackwardBegin) -> None:
        """Makes a backward that reaches one of `outputs` call `begin` with its number, unless that is `task` already.

        Args:
            outputs: tensors of a forward that require gradients.
            begin: the function to call.
        """
        self.in_other = False
        for tensor in outputs:
            self.unreached += 1
            tensor.register_hook(self._hook(begin, is_counted=True))

    def watch_recomputed(self, outputs: Iterable[torch.Tensor], begin: OnBackwardBegin) -> None:
        """Does what `watch` does, for outputs that were computed again and are counted already."""
        for tensor in outputs:
            tensor.register_hook(self._hook(begin, is_counted=False))

    def mark_unwatched(self, others: Iterable[torch.Tensor]) -> None:
        """Makes `in_other` true during each backward that reaches one of `others`, of a forward that is not watched."""

        @eager
        def reach(_: torch.Tensor) -> None:
            if not self.in_other:
                self.in_other = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_other)

        for tensor in others:
            tensor.register_hook(reach)

    @eager
    def _end_other(self) -> None:
        self.in_other = False

    def _hook(self, begin: OnBackwardBegin, is_counted: bool) -> Callable[[torch.Tensor], None]:
        @eager
        def reach(_: torch.Tensor) -> None:
            nonlocal is_counted
            if is_counted:
                is_counted = False
                self.unreached -= 1
            task = running_backward()
            if task != self.task:
                begin(task)

        return reach


class Reducer:
    """Averages the gradients of a module over the ranks of `group`.

    Args:
        tracked: the module's tensors.
        bucket_caps_bytes: how many bytes of gradients are reduced together, as for `make_buckets`.
        group: the ranks.
        name: the name of the module's class, for messages.
        find_unused: whether parameters may have no gradient after a backward.
        static_graph: whether all backwards are alike, so that the first one shows how many gradients each parameter
            gets, and which parameters get none.
        overlap: whether full buckets are reduced while backward goes on; the same on every rank.
        checks: looks at the gradients before they are averaged, and is told when they are.
        wire: what gradients are rounded to between hosts.
    """

    def __init__(
        self,
        tracked: TrackedTensors,
        bucket_caps_bytes: Sequence[int],
        group: ProcessGroup,
        *,
        name: str,
        find_unused: bool,
        static_graph: bool,
        overlap: bool,
        checks: ModuleChecks,
        wire: WireKind | None = None,
    ) -> None:
        # - What is averaged
        self._group = group
        self._gradients = GradientBuckets(tracked, bucket_caps_bytes)
        self.checks = checks
        self._averager = GradientAverager(self._gradients, group, checks=checks, wire=wire)
        self._stepped = take_over_steps(tracked.trained)  # the parameters whose optimizers step when backward ends

        # - What the user has said about the model
        self._overlap = overlap
        self._static_graph = static_graph
        self._find_unused = find_unused and not static_graph

        # - The state of the latest backward
        self._state = BackwardState.IDLE
        self._outputs = OutputHooks()
        self._recording = static_graph  # the first backward of a static graph has not shown yet how others go
        self._copy_shared = False  # forward's inputs require gradients, which may share memory with the parameters'
        self._unused_at_first: set[str] | None = None  # what the first forward did not use; None before it
        self._install_hooks()

        # - For messages and figures
        self.recorded = RecordedSteps("ddp")
        self.wait_s = 0.0  # the time spent at the ends of backwards
        self.forwards = 0  # the number of forwards whose backward averages
        self._reductions = 0
        self._module_name = name

    def _install_hooks(self) -> None:
        self._hooks: list[RemovableHandle] = []
        # Which parameters a backward leaves out is known only when it ends, so with find_unused nothing starts early.
        early = max(0, len(self._gradients.buckets) - 1) if self._overlap and not self._find_unused else 0
        self._countdown = Countdown(self._gradients.buckets, len(self._gradients.params), early)
        for at in range(early):
            for index in self._gradients.buckets[at].params:
                self._add_hook(self._gradients.params[index], self._count_hook(index, at))
        # This is for a backward that does not reach forward's outputs: it most likely ends with the first parameter.
        for param in self._gradients.params[:1]:
            self._add_hook(param, self._begin_without_outputs)
        self._sees_outputs = True  # False once a forward has returned no tensors that a hook could be put on

    def _add_hook(self, param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Takes the hooks off the parameters; idempotent."""
        self._state = BackwardState.IDLE
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def make_static(self) -> None:
        """Does what `static_graph=True` does, before the first forward."""
        self.close()
        self._static_graph = self._recording = True
        self._find_unused = False
        self._install_hooks()

    @property
    def comm_hook(self) -> CommHook | None:
        """Returns the hook that averages buckets instead of the engine, None if there is none."""
        return self._averager.comm_hook

    @comm_hook.setter
    def comm_hook(self, hook: CommHook) -> None:
        self._averager.comm_hook = hook

    def set_scale(self, scale: float) -> None:
        """Multiplies averages by `scale` from now on."""
        self._averager.scale = scale

    def bucket_sizes(self) -> list[int]:
        """Returns the size of each bucket in bytes."""
        return [bucket.nbytes for bucket in self._gradients.buckets]

    def before_forward(self, inputs: object) -> None:
        """Requires that the latest backward averaged all gradients, and notes the inputs that ranks compare.

        Raises:
            RuntimeError: parameters have no gradient, which the message names with the fix.
        """
        if self._state in (BackwardState.BACKWARD, BackwardState.COMPLETING):
            raise RuntimeError(f"{self._me()}: {AFTER_AN_ERROR}")
        if self._state is BackwardState.INCOMPLETE:
            self._raise_missing("the last backward")
        if not self._averager.same_batches.is_over:
            self._averager.same_batches.look(inputs)

    def expect(self, output: object, copy_shared: bool) -> None:
        """Makes the backward of `output` average the gradients.

        Args:
            output: what forward returned: tensors, nested in any way.
            copy_shared: whether forward's inputs require gradients, which may share memory with those of parameters.
        """
        self.forwards += 1
        if self._state in (BackwardState.IDLE, BackwardState.REPEATING):
            self._state = BackwardState.EXPECTING
            self._outputs.forget()
            self._countdown.reset()
            self._copy_shared = False
        outputs = [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
        self._copy_shared = self._copy_shared or copy_shared
        self._outputs.watch(outputs, self._begin)
        if self._unused_at_first is None:
            self._unused_at_first = self._unused_by(outputs)
        if not outputs and self._sees_outputs:
            self._sees_outputs = False
            for param in self._gradients.params:
                self._add_hook(param, self._begin_without_outputs)

    def _unused_by(self, outputs: Sequence[torch.Tensor]) -> set[str]:
        if not outputs or self._find_unused or self._static_graph:
            return set()
        return self._gradients.names_without(used_parameters(outputs))

    def leave_out(self, output: object) -> None:
        """Makes a backward of `output` average nothing, although another forward may await its own.

        Such a backward reaches the parameters as well, which alone would look like the awaited one.
        """
        self._outputs.mark_unwatched(tensor for tensor in find_tensors(output) if tensor.grad_fn is not None)

    def is_recomputing(self) -> bool:
        """Returns whether a backward calls forward again, for outputs that `expect` received before.

        With `use_reentrant=True` it did not receive them, since the first forward computes no gradients.
        """
        if not in_backward() or self._state is BackwardState.IDLE:
            return False
        return self._state is not BackwardState.REPEATING or running_backward() == self._outputs.task

    def follow(self, output: object) -> None:
        """Makes a backward of `output`, which was recomputed, average as well.

        Only a reentrant checkpoint makes such a backward. Otherwise the running backward uses what was recomputed, and
        averages as it would have without.
        """
        recomputed = [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
        self._outputs.watch_recomputed(recomputed, self._begin)

    def awaits_backward(self) -> bool:
        """Returns whether there has been no backward since the latest forward."""
        return self._state is BackwardState.EXPECTING

    def contribute_zeros(self) -> list[torch.Tensor | None]:
        """Takes part with zeros when other ranks average a backward's gradients, and keeps the averages.

        Returns:
            The gradients that this rank had before.
        """
        own = self._gradients.values()
        self.checks.make_fewer_steps()
        self._state = BackwardState.IDLE
        self._countdown.count_each_once()
        self._averager.same_batches.drop_digest()
        nothing = [None] * len(own)
        self._gradients.set_values(nothing if self._find_unused else self._gradients.zeros())
        self._average()
        return own

    def set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Restores the gradients that `contribute_zeros` returned."""
        self._gradients.set_values(gradients)

    # - How a backward begins

    @eager
    def _begin_without_outputs(self, _: torch.Tensor) -> None:
        is_own = self._state is BackwardState.EXPECTING and not self._outputs.in_other
        if is_own or self._state is BackwardState.INCOMPLETE:
            self._begin(running_backward())

    def _begin(self, task: int) -> None:
        self._outputs.task = task
        self.recorded.backward_begins()
        self._state = AFTER_BEGIN[self._state]
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    # - While it runs

    def _count_hook(self, index: int, at: int) -> Callable[[torch.Tensor], None]:
        countdown, backward = self._countdown, BackwardState.BACKWARD  # this runs once for each parameter

        @eager
        def count(param: torch.Tensor) -> None:
            if self._state is not backward:
                self._begin_without_outputs(param)
                if self._state is not backward:
                    return  # reduced with all others when it ends, if at all
            left = countdown.count(index, at)
            if left == 0 and not self._recording:
                self._averager.note_ready(at)
                self._averager.start_full(countdown)
            elif left < 0:
                name = self._gradients.names[index]
                raise RuntimeError(f"{self._me()}: {late_gradient_text(name, self._static_graph)}")

        return count

    # - How it ends

    @eager
    def _end(self) -> None:
        started = time.perf_counter()
        self._outputs.task = NO_BACKWARD
        try:
            self._average()
            if self._state is BackwardState.IDLE:
                self._reductions += 1
                step_params(self._stepped)
        except BaseException as error:
            self._state = BackwardState.IDLE  # the error is raised once, here, and not again by the next forward
            self._averager.abandon()
            if isinstance(error, CollectiveError):
                add_context(error, averaging_context(self._module_name, self._reductions + 1, self.forwards))
            raise
        finally:
            self.recorded.backward_ended(averaged=self._state is BackwardState.IDLE)
            self.wait_s += time.perf_counter() - started

    def _average(self) -> None:
        """Averages what has not been averaged yet, and sets the state by whether gradients are missing."""
        is_awaited = self._state not in (BackwardState.IDLE, BackwardState.REPEATING)
        if self._recording and not self._record():
            # This was torch.autograd.grad of tensors other than parameters; the parameters' backward may follow.
            self._state = BackwardState.EXPECTING if is_awaited else BackwardState.IDLE
            return
        if self._state is BackwardState.REPEATING and not self._find_unused and self._gradients.are_incomplete():
            self._require_used()
            self._averager.average_present(self._copy_shared)
            self._state = BackwardState.IDLE
            return
        self._gradients.fill_absent()
        if self._find_unused:
            self._gradients.take_present(self._group)
        first = self._countdown.next if self._state is BackwardState.BACKWARD else 0
        if self._averager.average_from(first, self._copy_shared):
            self._state = BackwardState.IDLE
            return
        self._require_used()
        self._state = BackwardState.INCOMPLETE if is_awaited else BackwardState.IDLE

    def _require_used(self) -> None:
        """Raises if only gradients are missing that no other backward can compute, since forward did not use them."""
        unused = self._unused_at_first
        if unused and self._outputs.unreached == 0 and unused.issuperset(self._gradients.missing()):
            self._raise_missing("this backward")

    def _record(self) -> bool:
        """Learns what to expect from the first backward of a static graph, and returns whether this was one."""
        anywhere = self._gradients.settle_present(self._group)
        if not any(anywhere):
            return False
        self._recording = False
        self._countdown.learn(anywhere)
        return True

    def _raise_missing(self, which: str) -> None:
        names, missing = self._gradients.names, self._gradients.missing()
        text = missing_gradient_text(which, missing, self._gradients.frozen(), len(names), self._static_graph)
        raise RuntimeError(f"{self._me()}: {text}")

    def _me(self) -> str:
        return f"rank {self._group.ranks[self._group.rank()]}"


class ExternalAverager(Protocol):
    """Averages the gradients of a module's parameters, wherever they are."""

    def before_forward(self) -> None:
        """Is called before a forward whose backward averages."""
        ...

    def average(self) -> None:
        """Replaces the gradients by their mean over the ranks."""
        ...

    def skip(self) -> None:
        """Does the same on a rank whose own gradients do not count."""
        ...

    def set_weight(self, weight: float) -> None:
        """Sets the weight of this rank in the next mean."""
        ...


class DelegatingReducer(Reducer):
    """Decides when a backward is over, and has `averages` do the rest; nothing is reduced before that.

    Args:
        tracked: the module's tensors.
        bucket_caps_bytes: as for `Reducer`.
        group: a group of this rank only.
        averages: what averages.
        name: the name of the module's class, for messages.
        find_unused: whether parameters may have no gradient after a backward.
        checks: looks at this rank's gradients.
    """

    def __init__(
        self,
        tracked: TrackedTensors,
        bucket_caps_bytes: Sequence[int],
        group: ProcessGroup,
        averages: ExternalAverager,
        *,
        name: str,
        find_unused: bool,
        checks: ModuleChecks,
    ) -> None:
        super().__init__(
            tracked,
            bucket_caps_bytes,
            group,
            name=name,
            find_unused=find_unused,
            static_graph=False,
            overlap=False,
            checks=checks,
        )
        self._averages = averages

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged."""
        return self._gradients.params

    def before_forward(self, inputs: object) -> None:
        """Requires that the latest backward averaged all gradients.

        Raises:
            RuntimeError: parameters have no gradient, which the message names with the fix.
        """
        super().before_forward(inputs)
        self._averages.before_forward()

    def require_averaged(self) -> None:
        """Requires that the latest backward left no parameter without a gradient, for which the others would wait.

        Raises:
            RuntimeError: it did, which the message says with the names and the fix.
        """
        if self._state is BackwardState.INCOMPLETE:
            self._raise_missing("the last backward")

    def make_static(self) -> None:
        """Lets backwards leave out parameters; nothing else depends on whether they are alike."""
        self._find_unused = True

    def skip(self) -> None:
        """Takes part in the mean of the others' gradients without a backward, or after one that failed."""
        started = time.perf_counter()
        self._state = BackwardState.IDLE
        self._averages.skip()
        step_params(self._stepped)
        self.wait_s += time.perf_counter() - started

    def _average(self) -> None:
        is_repeating, is_awaited = self._state is BackwardState.REPEATING, self._state is not BackwardState.IDLE
        if is_repeating and not self._gradients.any_present():
            self._state = (
                BackwardState.IDLE
            )  # it computed the gradients of other tensors, which concerns this rank only
            return
        if not (is_repeating or self._find_unused) and self._gradients.are_incomplete():
            self._require_used()
            self._state = BackwardState.INCOMPLETE if is_awaited else BackwardState.IDLE
            return
        self.checks.look_at(self._gradients.names, self._gradients.values())
        self._averages.average()
        self.checks.end([each for each in self._gradients.values() if each is not None])
        self._state = BackwardState.IDLE
