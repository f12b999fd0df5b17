"""Reducer: a state machine that determines when the gradients of a module are averaged.

Note: the lifecycle of a backward pass
    1. `Reducer.before_forward` checks that the gradients of the previous backward pass were averaged.
    2. `Reducer.expect` receives the output of forward. Autograd has no callback for the start of a backward pass, so
       every output tensor gets a hook (`OutputHooks`), and the first hook that runs marks the start. Until then the
       state is EXPECTING.
    3. `Reducer._begin` queues `Reducer._end` as the autograd engine's final callback. The state is BACKWARD.
    4. Each parameter in a bucket that may be reduced early has a hook that decrements the bucket's counter
       (`GradientAverager.count_and_start`). Full buckets are passed to the group's progress thread, strictly in order,
       because all ranks must call collectives in the same order. The hooks hold a lock, because autograd uses one
       thread per device and two threads could otherwise start the same bucket.
    5. `Reducer._end` reduces all other buckets on this thread, waits for the calls in flight, and copies averages back
       to gradients that were not reduced in place (`GradientAverager.average_rest`). The last bucket becomes full only
       when backward is about to end. It therefore always waits for the end, and its parameters need no hooks. The state
       returns to IDLE.

    If a gradient is missing when backward ends, the remaining buckets are not reduced; the state is INCOMPLETE. Another
    backward pass may compute the missing gradient (COMPLETING), for example if `backward` is called separately on two
    losses from one forward pass. If none does, the next `Reducer.before_forward` raises an error.

    Averaging is idempotent: gradients that are already averaged do not change. After gradients have been averaged,
    another backward pass (through a retained graph, or through the second of two forward passes) can therefore average
    all gradients again with correct results (REPEATING). In such a backward pass no bucket starts early. If the program
    has cleared the gradients in between, the backward pass may reach only some parameters. The ranks then first compare
    which gradients they have, as with `find_unused_parameters` (`GradientAverager.average_again`).
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
from paceline.train.ddp.error_text import (
    AFTER_AN_ERROR,
    add_context,
    averaging_context,
    late_gradient_text,
    missing_gradient_text,
)
from paceline.train.ddp.gradient_averager import GradientAverager
from paceline.train.ddp.optimizer_in_backward import step_params, take_over_steps
from paceline.train.training_events import RecordedSteps


class BackwardState(Enum):
    """The progress of a forward pass's gradients toward their average; see the Note above."""

    IDLE = "no forward awaits averages, or its gradients were averaged"
    EXPECTING = "forward was called, and no backward of it has begun"
    BACKWARD = "the first backward runs"
    INCOMPLETE = "backward has ended and left parameters without a gradient"
    COMPLETING = "a later backward runs, which may compute the missing gradients"
    REPEATING = "a backward runs although gradients were averaged before"


AFTER_BEGIN = {
    BackwardState.IDLE: BackwardState.REPEATING,
    BackwardState.EXPECTING: BackwardState.BACKWARD,
    BackwardState.BACKWARD: BackwardState.COMPLETING,  # a nested backward pass, or one after a failed backward pass
    BackwardState.INCOMPLETE: BackwardState.COMPLETING,
    BackwardState.COMPLETING: BackwardState.COMPLETING,
    BackwardState.REPEATING: BackwardState.REPEATING,
}


class Reducer:
    """Averages the gradients of a module during each backward pass and at its end.

    Error messages contain `name`, the name of the module's class.
    """

    def __init__(self, averager: GradientAverager, name: str) -> None:
        self._averager = averager
        self._gradients = averager.gradients
        self._stepped = take_over_steps(self._gradients.named())  # parameters to step when backward ends

        # - The state of the latest backward pass. Hooks hold the lock because autograd uses one thread per device. The
        #   lock is reentrant because a user's communication hook may run another backward pass.
        self._lock = threading.RLock()
        self._state = BackwardState.IDLE
        self._outputs = OutputHooks(self._lock)
        self._copy_shared = False  # whether parameter gradients may share memory with those of forward's inputs
        self._missing: list[str] = []  # in state INCOMPLETE: the parameters without a gradient when backward ended
        self._unused_at_first: set[str] | None = None  # parameters unused by the first forward pass; None before it
        self._install_hooks()

        # - Error messages and statistics
        first = next(iter(self._gradients.params), None)  # None if all parameters are delayed
        self.recorded = RecordedSteps("ddp", torch.device("cpu") if first is None else first.device)
        self.wait_s = 0.0  # the total time spent on averaging at the end of backward passes
        self.forwards = 0  # the number of calls to `expect`
        self._reductions = 0
        self._module_name = name

    def _install_hooks(self) -> None:
        self._hooks: list[RemovableHandle] = []
        params = self._gradients.params
        for index in self._averager.counted_params():
            self._add_hook(params[index], self._count_hook(index))
        # A backward pass that does not pass through forward's outputs most likely ends with the first parameter.
        for param in params[:1]:
            self._add_hook(param, self._begin_without_outputs)
        self._sees_outputs = True  # False once a forward pass has returned no differentiable tensors

    def _add_hook(self, param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Removes the hooks from the parameters; idempotent."""
        self._state = BackwardState.IDLE
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def make_static(self) -> None:
        """Enables `static_graph`; must be called before the first forward pass."""
        self.close()
        self._averager.make_static()
        self._install_hooks()

    # - Calls before and after forward

    def before_forward(self, inputs: object) -> None:
        """Calls `require_averaged`, and passes the inputs to the averager."""
        if self._state in (BackwardState.BACKWARD, BackwardState.COMPLETING):
            raise RuntimeError(f"{self._me()}: {AFTER_AN_ERROR}")
        self.require_averaged()
        self._averager.before_forward(inputs)

    def require_averaged(self) -> None:
        """Checks that the latest backward pass left no parameter without a gradient.

        Raises:
            RuntimeError: some parameters have no gradient; the message contains their names and the fix.
        """
        if self._state is BackwardState.INCOMPLETE:
            self._raise_missing("the last backward", self._missing)

    def expect(self, output: object, copy_shared: bool) -> None:
        """Registers the (possibly nested) output of forward so that a backward pass through it averages the gradients.

        If an input to forward requires a gradient, its gradient may share memory with a parameter's gradient;
        `copy_shared` must then be True.
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
        used = used_parameters(outputs)
        return {name for name, param in self._gradients.named().items() if id(param) not in used}

    def leave_out(self, output: object) -> None:
        """Excludes `output` from averaging, even while another forward pass awaits its backward pass.

        A backward pass through `output` also reaches the parameters. If `output` were not excluded, such a backward
        pass would be mistaken for the awaited one.
        """
        self._outputs.mark_unwatched(_differentiable(output))

    def is_recomputing(self) -> bool:
        """Returns True if a backward pass is recomputing outputs that `expect` has received.

        With `use_reentrant=True`, `expect` has not received the outputs, because the first forward pass records no
        graph.
        """
        if not in_backward() or self._state is BackwardState.IDLE:
            return False
        return self._state is not BackwardState.REPEATING or running_backward() == self._outputs.task

    def follow(self, output: object) -> None:
        """Registers a recomputed `output` so that a backward pass through it also averages the gradients.

        Only reentrant checkpointing runs a separate backward pass through recomputed outputs. With non-reentrant
        checkpointing, the running backward pass uses them and averages as usual.
        """
        self._outputs.watch(_differentiable(output), self._begin, is_recomputed=True)

    def awaits_backward(self) -> bool:
        """Returns True if no backward pass has started since the latest forward pass."""
        return self._state is BackwardState.EXPECTING

    # - Averages without a backward pass

    def contribute_zeros(self) -> list[torch.Tensor | None]:
        """Contributes zeros to the average, sets this rank's gradients to it, and returns the previous gradients."""
        self._state = BackwardState.IDLE
        own = self._averager.replace_by_zeros()
        self._average()
        return own

    def skip(self, take_part: Callable[[], None]) -> None:
        """Calls `take_part` instead of a backward pass; `take_part` sets the gradients to the other ranks' average."""
        started = time.perf_counter()
        self._state = BackwardState.IDLE
        take_part()
        step_params(self._stepped)
        self.wait_s += time.perf_counter() - started

    # - Start of a backward pass

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

    # - Gradient hooks during a backward pass

    def _count_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Local variables keep the hook cheap: it runs for each parameter in each backward pass.
        count, backward, lock = self._averager.count_and_start, BackwardState.BACKWARD, self._lock

        @eager
        def hook(param: torch.Tensor) -> None:
            with lock:
                if self._state is not backward:
                    self._begin_without_outputs(param)
                    if self._state is not backward:
                        return  # this gradient is reduced when backward ends, or not at all
                if not count(index):
                    text = late_gradient_text(self._gradients.names[index], self._averager.static_graph)
                    raise RuntimeError(f"{self._me()}: {text}")

        return hook

    # - End of a backward pass

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
            self._state = BackwardState.IDLE  # the next forward pass must not raise the error again
            self._averager.abandon()
            if isinstance(error, CollectiveError):
                add_context(error, averaging_context(self._module_name, self._reductions + 1, self.forwards))
            raise
        finally:
            self.recorded.backward_ended(averaged=self._state is BackwardState.IDLE)
            self.wait_s += time.perf_counter() - started

    def _average(self) -> None:
        """Averages the gradients that have not been averaged; the new state depends on whether any are missing."""
        is_awaited = self._state not in (BackwardState.IDLE, BackwardState.REPEATING)
        if not self._averager.record_static():
            # The backward pass was a torch.autograd.grad call for other tensors; a backward pass for the parameters may
            # follow.
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
        if is_awaited:  # determined now, because the program may clear all gradients before the next forward pass
            self._missing = self._gradients.missing()

    def _require_used(self) -> None:
        """Raises an error if all missing gradients belong to parameters that forward did not use."""
        unused = self._unused_at_first
        if unused and self._outputs.unreached == 0:
            missing = self._gradients.missing()
            if missing and unused.issuperset(missing):
                self._raise_missing("this backward", missing)

    def _raise_missing(self, which: str, missing: Sequence[str]) -> None:
        named = self._gradients.named()
        frozen = {name for name, param in named.items() if not param.requires_grad}
        text = missing_gradient_text(which, missing, frozen, len(named), self._averager.static_graph)
        raise RuntimeError(f"{self._me()}: {text}")

    def _me(self) -> str:
        return f"rank {self._averager.group.me.rank}"


class OutputHooks:
    """Installs hooks on the outputs of forward passes; the hooks run when a backward pass reaches the outputs.

    A hook holds the lock while it runs, because autograd uses one thread per device.

    Attributes:
        task: autograd's task id of the running backward pass; `on_begin` sets it.
        unreached: the number of outputs that no backward pass has reached yet.
        in_other: whether the running backward pass has reached an output passed to `mark_unwatched`.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self.task = NO_BACKWARD
        self.unreached = 0
        self.in_other = False

    def forget(self) -> None:
        """Discards the state of earlier forward passes and their backward passes."""
        self.task = NO_BACKWARD
        self.unreached = 0

    def watch(
        self, outputs: Sequence[torch.Tensor], on_begin: Callable[[int], None], *, is_recomputed: bool = False
    ) -> None:
        """Registers hooks that call `on_begin` when a backward pass other than `self.task` reaches one of `outputs`.

        The argument to `on_begin` is autograd's task id of the backward pass. Recomputed outputs have already been
        counted.
        """
        if not is_recomputed:
            self.in_other = False
            self.unreached += len(outputs)
        for tensor in outputs:
            tensor.register_hook(self._hook(on_begin, is_counted=not is_recomputed))

    def mark_unwatched(self, others: Iterable[torch.Tensor]) -> None:
        """Sets `in_other` in each backward pass that reaches `others`, the outputs of a forward pass in `no_sync`."""

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
    """Returns the tensors in an output from which a backward pass can start."""
    return [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
