"""Reducer: the state machine that decides when the gradients of a module are averaged.

Note: the life of a backward
    1. `Reducer.before_forward` requires that the gradients of the previous backward were averaged.
    2. `Reducer.expect` receives the output of forward. Autograd does not announce a backward, so every output tensor
       gets a hook (`OutputHooks`), and the first hook that runs shows that a backward has begun. Until then the state
       is EXPECTING.
    3. `Reducer._begin` asks the autograd engine to call `Reducer._end` after this backward. The state is BACKWARD.
    4. Each parameter in a bucket that may be reduced early has a hook, which counts down its bucket
       (`GradientAverager.count`). Full buckets are passed to the group's progress thread, strictly in order, since
       every rank must make the same calls in the same order. The hooks hold a lock: autograd has a thread for each
       device, and two of them could otherwise start the same bucket.
    5. `Reducer._end` reduces everything else on this thread, waits for the calls in flight, and writes averages that
       were computed in copies back to the gradients (`GradientAverager.average_rest`). The last bucket can only become
       full when backward is about to end, so it always waits for the end, and its parameters need no hooks. The state
       is IDLE again.

    If a gradient is missing when the backward ends, the others cannot be averaged, and the state is INCOMPLETE. Another
    backward may compute the missing gradient (COMPLETING), for example if two losses of one forward have a backward
    each; otherwise the next `Reducer.before_forward` raises an error.

    Averaging gradients that were averaged already does not change them. A backward that follows one whose gradients
    were averaged (of a retained graph, or of the other of two forwards) therefore averages all gradients again, and all
    are correct afterwards (REPEATING). For the same reason no bucket starts early in a backward that is not the first
    one: some buckets were averaged before. If the program has cleared the gradients in between, such a backward may
    reach only some parameters; then the ranks first compare which gradients they have, as they do with
    `find_unused_parameters` (`GradientAverager.average_again`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import Enum

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.group.eager import eager
from paceline.errors import CollectiveError
from paceline.train.autograd_graph import NO_BACKWARD, find_tensors, in_backward, running_backward, used_parameters
from paceline.train.ddp.error_text import AFTER_AN_ERROR, add_context, averaging_context
from paceline.train.ddp.gradient_averager import GradientAverager
from paceline.train.ddp.optimizer_in_backward import step_params, take_over_steps
from paceline.train.training_events import RecordedSteps


class BackwardState(Enum):
    """The state of the gradients that a forward requires to be averaged; see the Note above."""

    IDLE = "no forward awaits averages, or its gradients were averaged"
    EXPECTING = "forward was called, and no backward of it has begun"
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


class Reducer:
    """Averages the gradients of a module during and after each backward.

    Args:
        averager: the object that makes the calls.
        name: the name of the module's class, for messages.
    """

    def __init__(self, averager: GradientAverager, name: str) -> None:
        self._averager = averager
        self._gradients = averager.gradients
        self._stepped = take_over_steps(self._gradients.named())  # parameters whose optimizers step at backward's end

        # - The state of the latest backward. Hooks hold the lock, since autograd has a thread for each device. It is
        #   reentrant since a user's hook, called for a bucket, may run another backward.
        self._lock = threading.RLock()
        self._state = BackwardState.IDLE
        self._outputs = OutputHooks(self._lock)
        self._copy_shared = False  # forward's inputs require gradients, which may share memory with the parameters'
        self._unused_at_first: set[str] | None = None  # parameters that the first forward did not use; None before it
        self._install_hooks()

        # - For messages and statistics
        first = next(iter(self._gradients.params), None)  # None if all parameters are delayed
        self.recorded = RecordedSteps("ddp", torch.device("cpu") if first is None else first.device)
        self.wait_s = 0.0  # the time spent at the ends of backwards
        self.forwards = 0  # the number of forwards whose backward averages
        self._reductions = 0
        self._module_name = name

    def _install_hooks(self) -> None:
        self._hooks: list[RemovableHandle] = []
        params = self._gradients.params
        for index in self._averager.counted_params():
            self._add_hook(params[index], self._count_hook(index))
        # This is for a backward that does not reach forward's outputs: it most likely ends with the first parameter.
        for param in params[:1]:
            self._add_hook(param, self._begin_without_outputs)
        self._sees_outputs = True  # False once a forward has returned no tensors that a hook could be put on

    def _add_hook(self, param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Removes the hooks from the parameters; idempotent."""
        self._state = BackwardState.IDLE
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def make_static(self) -> None:
        """Applies `static_graph=True` before the first forward."""
        self.close()
        self._averager.make_static()
        self._install_hooks()

    # - Around forward

    def before_forward(self, inputs: object) -> None:
        """Requires that the latest backward averaged all gradients, and passes the inputs to the averager.

        Raises:
            RuntimeError: parameters have no gradient; the message contains their names and the fix.
        """
        if self._state in (BackwardState.BACKWARD, BackwardState.COMPLETING):
            raise RuntimeError(f"{self._me()}: {AFTER_AN_ERROR}")
        self.require_averaged()
        self._averager.before_forward(inputs)

    def require_averaged(self) -> None:
        """Requires that the latest backward left no parameter without a gradient.

        Raises:
            RuntimeError: some parameters have no gradient; the message contains their names and the fix.
        """
        if self._state is BackwardState.INCOMPLETE:
            self._raise_missing("the last backward")

    def expect(self, output: object, copy_shared: bool) -> None:
        """Makes the backward of `output` average the gradients.

        Args:
            output: the output of forward: tensors, nested in any way.
            copy_shared: whether forward's inputs require gradients, which may share memory with those of parameters.
        """
        self.forwards += 1
        if self._state in (BackwardState.IDLE, BackwardState.REPEATING):
            self._state = BackwardState.EXPECTING
            self._outputs.forget()
            self._averager.reset_counts()
            self._copy_shared = False
        outputs = _differentiable(output)
        self._copy_shared = self._copy_shared or copy_shared
        self._outputs.watch(outputs, self._begin)
        if self._unused_at_first is None:
            self._unused_at_first = self._unused_by(outputs)
        if not outputs and self._sees_outputs:
            self._sees_outputs = False
            for param in self._gradients.params:
                self._add_hook(param, self._begin_without_outputs)

    def _unused_by(self, outputs: Sequence[torch.Tensor]) -> set[str]:
        if not outputs or self._averager.allows_unused:
            return set()
        return self._gradients.names_without(used_parameters(outputs))

    def leave_out(self, output: object) -> None:
        """Prevents a backward of `output` from averaging, even if another forward awaits its backward.

        Such a backward reaches the parameters too, and would otherwise be mistaken for the awaited one.
        """
        self._outputs.mark_unwatched(_differentiable(output))

    def is_recomputing(self) -> bool:
        """Returns whether a backward calls forward again, to recompute outputs that `expect` has received.

        With `use_reentrant=True`, `expect` has not received them, since the first forward computes no gradients.
        """
        if not in_backward() or self._state is BackwardState.IDLE:
            return False
        return self._state is not BackwardState.REPEATING or running_backward() == self._outputs.task

    def follow(self, output: object) -> None:
        """Makes a backward of the recomputed `output` average as well.

        Only a reentrant checkpoint runs such a backward. Otherwise the running backward uses the recomputed tensors and
        averages as usual.
        """
        self._outputs.watch_recomputed(_differentiable(output), self._begin)

    def awaits_backward(self) -> bool:
        """Returns whether no backward has begun since the latest forward."""
        return self._state is BackwardState.EXPECTING

    # - Averages without a backward

    def contribute_zeros(self) -> list[torch.Tensor | None]:
        """Contributes zeros when other ranks average a backward's gradients, and keeps the averages.

        Returns:
            The gradients that this rank had before.
        """
        self._state = BackwardState.IDLE
        own = self._averager.replace_by_zeros()
        self._average()
        return own

    def skip(self, take_part: Callable[[], None]) -> None:
        """Sets the gradients to the other ranks' average by calling `take_part`, instead of running a backward."""
        started = time.perf_counter()
        self._state = BackwardState.IDLE
        take_part()
        step_params(self._stepped)
        self.wait_s += time.perf_counter() - started

    # - How a backward begins

    @eager
    def _begin_without_outputs(self, _: torch.Tensor) -> None:
        with self._lock:
            is_own = self._state is BackwardState.EXPECTING and not self._outputs.in_other
            if is_own or self._state is BackwardState.INCOMPLETE:
                self._begin(running_backward())

    def _begin(self, task: int) -> None:
        self._outputs.task = task
        self.recorded.backward_begins()
        self._state = AFTER_BEGIN[self._state]
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    # - While it runs

    def _count_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # The hook runs once for each parameter.
        count, backward, lock = self._averager.count_and_start, BackwardState.BACKWARD, self._lock

        @eager
        def hook(param: torch.Tensor) -> None:
            with lock:
                if self._state is not backward:
                    self._begin_without_outputs(param)
                    if self._state is not backward:
                        return  # reduced with all others when backward ends, if at all
                if not count(index):
                    raise RuntimeError(f"{self._me()}: {self._averager.late_text(index)}")

        return hook

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
        """Averages all gradients that were not averaged yet; the new state depends on whether gradients are missing."""
        is_awaited = self._state not in (BackwardState.IDLE, BackwardState.REPEATING)
        if not self._averager.record_static():
            # This was torch.autograd.grad of tensors other than parameters; the parameters' backward may follow.
            self._state = BackwardState.EXPECTING if is_awaited else BackwardState.IDLE
            return
        if self._state is BackwardState.REPEATING:
            self._require_used()
            self._averager.average_again(self._copy_shared)
            self._state = BackwardState.IDLE
            return
        if self._averager.average_rest(self._copy_shared, after_started=self._state is BackwardState.BACKWARD):
            self._state = BackwardState.IDLE
            return
        self._require_used()
        self._state = BackwardState.INCOMPLETE if is_awaited else BackwardState.IDLE

    def _require_used(self) -> None:
        """Raises if forward used none of the parameters without a gradient: no other backward can compute these."""
        unused = self._unused_at_first
        if unused and self._outputs.unreached == 0:
            missing = self._gradients.missing()
            if missing and unused.issuperset(missing):
                self._raise_missing("this backward")

    def _raise_missing(self, which: str) -> None:
        raise RuntimeError(f"{self._me()}: {self._averager.missing_text(which)}")

    def _me(self) -> str:
        return f"rank {self._averager.group.me.rank}"


class OutputHooks:
    """Hooks on the outputs of forwards, which run when a backward reaches the outputs.

    Args:
        lock: the lock that is held while a hook runs, for outputs on several devices.

    Attributes:
        task: the autograd engine's number of the running backward; `on_begin` sets it.
        unreached: the number of outputs that no backward has reached yet, whose gradients may still be computed.
        in_other: whether the running backward has reached an output passed to `mark_unwatched`.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self.task = NO_BACKWARD
        self.unreached = 0
        self.in_other = False

    def forget(self) -> None:
        """Discards the state of earlier forwards and their backward."""
        self.task = NO_BACKWARD
        self.unreached = 0

    def watch(self, outputs: Iterable[torch.Tensor], on_begin: Callable[[int], None]) -> None:
        """Registers hooks that call `on_begin(task)` when a backward other than `task` reaches one of `outputs`.

        Args:
            outputs: the tensors of a forward that require gradients.
            on_begin: the function to call with the autograd engine's number of the backward.
        """
        self.in_other = False
        for tensor in outputs:
            self.unreached += 1
            tensor.register_hook(self._hook(on_begin, is_counted=True))

    def watch_recomputed(self, outputs: Iterable[torch.Tensor], on_begin: Callable[[int], None]) -> None:
        """Registers the same hooks on recomputed outputs, which have already been counted."""
        for tensor in outputs:
            tensor.register_hook(self._hook(on_begin, is_counted=False))

    def mark_unwatched(self, others: Iterable[torch.Tensor]) -> None:
        """Sets `in_other` during each backward that reaches one of `others`, the outputs of a forward in `no_sync`."""

        @eager
        def reach(_: torch.Tensor) -> None:
            with self._lock:
                if not self.in_other:
                    self.in_other = True
                    torch.autograd.Variable._execution_engine.queue_callback(self._end_other)

        for tensor in others:
            tensor.register_hook(reach)

    @eager
    def _end_other(self) -> None:
        self.in_other = False

    def _hook(self, on_begin: Callable[[int], None], is_counted: bool) -> Callable[[torch.Tensor], None]:
        @eager
        def reach(_: torch.Tensor) -> None:
            nonlocal is_counted
            with self._lock:
                if is_counted:
                    is_counted = False
                    self.unreached -= 1
                task = running_backward()
                if task != self.task:
                    on_begin(task)

        return reach


def _differentiable(output: object) -> list[torch.Tensor]:
    """Returns the tensors of an output that a backward can start from."""
    return [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
