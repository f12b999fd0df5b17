"""Averages gradients over the ranks: while backward still computes others, or when it ends.

Note: the life of a backward
    1. `before_forward` makes sure that the gradients of the backward before were averaged.
    2. `expect` gets what forward returned. Autograd does not announce a backward, so every output gets a hook, and the
       first of them that runs shows that a backward has begun. Now the state is EXPECTING.
    3. `_begin` asks the autograd engine to call `_end` after this backward. Now it is BACKWARD.
    4. Each parameter in a bucket that may be reduced early has a hook, which counts its bucket down. Full buckets are
       handed to the group's progress thread, strictly in their order, since every rank must make the same calls in the
       same order (`_start_full_buckets`).
    5. `_end` reduces everything else on this thread, waits for the calls in flight, and puts averages that were
       computed in copies into the parameters' gradients (`_average`). The last bucket can only become full when
       backward is about to end, so it always waits for the end, and its parameters need no hooks. Now it is IDLE.

    If a gradient is missing at the end, what is there cannot be averaged: it is INCOMPLETE. Another backward may bring
    the gradient (COMPLETING, for example when two losses of one forward go backward one after the other); otherwise
    the next `before_forward` raises.

    Averaging what is averaged already changes nothing. So a backward that follows one whose gradients were averaged
    (of a retained graph, or of the other of two forwards) averages all gradients again and ends right (REPEATING). For
    the same reason nothing starts early in a backward that is not the first one: some buckets were averaged before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import CollectiveError
from paceline.group.process_group import ProcessGroup
from paceline.parallel.ddp.averaging import Averager
from paceline.parallel.ddp.countdown import Countdown
from paceline.parallel.ddp.error_text import (
    AFTER_AN_ERROR,
    add_context,
    averaging_context,
    late_gradient_text,
    missing_gradient_text,
)
from paceline.parallel.ddp.fused_step import step_params, take_over_steps
from paceline.parallel.ddp.gradient_buckets import GradientBuckets
from paceline.parallel.ddp.hook import CommHook
from paceline.parallel.graph import NO_BACKWARD, find_tensors, in_backward, running_backward, used_parameters
from paceline.parallel.tracked_tensors import TrackedTensors


class State(Enum):
    """What became of the gradients that a forward asked to be averaged; see the Note above."""

    IDLE = "there are none, or they are averaged"
    EXPECTING = "a forward was made, and no backward of it has begun"
    BACKWARD = "the first backward runs"
    INCOMPLETE = "backward has ended and left parameters without a gradient"
    COMPLETING = "a later backward runs, which may bring what was missing"
    REPEATING = "a backward runs although the gradients were averaged before"


_AFTER_BEGIN = {
    State.IDLE: State.REPEATING,
    State.EXPECTING: State.BACKWARD,
    State.BACKWARD: State.COMPLETING,  # a backward within a backward, or after one that failed
    State.INCOMPLETE: State.COMPLETING,
    State.COMPLETING: State.COMPLETING,
    State.REPEATING: State.REPEATING,
}


class Reducer:
    """Averages the gradients of a module over the ranks of `group`.

    Args:
        tracked: the module's tensors.
        bucket_caps_bytes: how many bytes of gradients are reduced together, as for `make_buckets`.
        group: the ranks.
        name: the name of the module's class, for messages.
        find_unused: parameters may stay without a gradient.
        static_graph: the first backward shows how often each parameter gets a gradient in the others, and which stay
            without.
        overlap: reduce full buckets while backward goes on; the same on every rank.
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
    ) -> None:
        # - What is averaged
        self._group = group
        self._gradients = GradientBuckets(tracked, bucket_caps_bytes)
        self._averager = Averager(self._gradients, group)
        self._stepped = take_over_steps(tracked.trained)  # parameters whose optimizers step when backward ends

        # - What the user has promised
        self._overlap = overlap
        self._static_graph = static_graph
        self._find_unused = find_unused and not static_graph

        # - Where the reducer is; see the Note above
        self._state = State.IDLE
        self._task = NO_BACKWARD  # the autograd engine's number of the backward that runs
        self._recording = static_graph  # the first backward of a static graph has not shown yet how others go
        self._outputs_left = 0  # outputs of forwards that no backward has reached: their gradients may still come
        self._copy_shared = False  # forward's inputs require gradients, which may share memory with the parameters'
        self._unused_at_first: set[str] | None = None  # what the first forward did not use; None before it
        self._install_hooks()

        # - For messages and figures
        self.wait_s = 0.0  # spent at the ends of backwards
        self.forwards = 0  # whose backward averages
        self._reductions = 0
        self._module_name = name

    def _install_hooks(self) -> None:
        self._hooks: list[RemovableHandle] = []
        # Which parameters a backward left out is known only when it ends, so with find_unused nothing starts early.
        early = max(0, len(self._gradients.buckets) - 1) if self._overlap and not self._find_unused else 0
        self._countdown = Countdown(self._gradients.buckets, len(self._gradients.params), early)
        for at in range(early):
            for index in self._gradients.buckets[at].params:
                self._add_hook(self._gradients.params[index], self._count_hook(index, at))
        # For a backward that does not come through forward's outputs: it most likely ends with the first parameter.
        for param in self._gradients.params[:1]:
            self._add_hook(param, self._begin_unseen)
        self._sees_outputs = True  # False once a forward has returned no tensors that a hook could be put on

    def _add_hook(self, param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Takes the hooks off the parameters; idempotent."""
        self._state = State.IDLE
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
        """The hook that averages buckets instead of the engine."""
        return self._averager.comm_hook

    @comm_hook.setter
    def comm_hook(self, hook: CommHook) -> None:
        self._averager.comm_hook = hook

    def set_scale(self, scale: float) -> None:
        """Has averages multiplied by `scale` from now on."""
        self._averager.scale = scale

    def bucket_sizes(self) -> list[int]:
        """Returns each bucket's bytes."""
        return [bucket.nbytes for bucket in self._gradients.buckets]

    def before_forward(self, inputs: object) -> None:
        """Makes sure that the latest backward averaged all gradients, and compares this rank's inputs with others'.

        Raises:
            RuntimeError: names the parameters without a gradient, and the fix.
        """
        if self._state in (State.BACKWARD, State.COMPLETING):
            raise RuntimeError(f"{self._me()}: {AFTER_AN_ERROR}")
        if self._state is State.INCOMPLETE:
            self._raise_missing("the last backward")
        if not self._averager.same_batches.is_over:
            self._averager.same_batches.look(inputs)

    def expect(self, output: object, copy_shared: bool) -> None:
        """Has the backward of `output` average the gradients.

        Args:
            output: what forward returned: tensors in any nest.
            copy_shared: forward's inputs require gradients, which may share memory with those of parameters.
        """
        self.forwards += 1
        if self._state in (State.IDLE, State.REPEATING):
            self._state = State.EXPECTING
            self._task = NO_BACKWARD
            self._countdown.reset()
            self._copy_shared = False
            self._outputs_left = 0
        outputs = [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
        self._copy_shared = self._copy_shared or copy_shared
        self._outputs_left += len(outputs)
        for tensor in outputs:
            tensor.register_hook(self._output_hook())
        if self._unused_at_first is None:
            self._unused_at_first = self._unused_by(outputs)
        if not outputs and self._sees_outputs:
            self._sees_outputs = False
            for param in self._gradients.params:
                self._add_hook(param, self._begin_unseen)

    def _unused_by(self, outputs: Sequence[torch.Tensor]) -> set[str]:
        if not outputs or self._find_unused or self._static_graph:
            return set()
        used = used_parameters(outputs)
        named = zip(self._gradients.names, self._gradients.params, strict=True)
        return {name for name, param in named if id(param) not in used}

    def is_recomputing(self) -> bool:
        """Whether a backward calls forward again, for outputs that were expected before.

        With `use_reentrant=True` nothing was expected: the first forward was made without gradients.
        """
        if not in_backward() or self._state is State.IDLE:
            return False
        return self._state is not State.REPEATING or running_backward() == self._task

    def follow(self, output: object) -> None:
        """Has a backward of `output`, which was recomputed, average too: a reentrant checkpoint makes one.

        Without one, what was recomputed serves the backward that runs, which averages as it would have.
        """
        for tensor in find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._begin_seen)

    def awaits_backward(self) -> bool:
        """Whether the latest forward has had no backward."""
        return self._state is State.EXPECTING

    def join_with_zeros(self) -> list[torch.Tensor | None]:
        """Takes part with zeros in the averaging of a backward that other ranks make, and takes over their average.

        Returns:
            The gradients that this rank had.
        """
        own = self._gradients.values()
        self._state = State.IDLE
        self._countdown.count_each_once()
        self._averager.same_batches.look_away()
        nothing = [None] * len(own)
        self._gradients.set_values(nothing if self._find_unused else self._gradients.zeros())
        self._average()
        return own

    def set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Puts back what `join_with_zeros` returned."""
        self._gradients.set_values(gradients)

    # - How a backward begins

    def _output_hook(self) -> Callable[[torch.Tensor], None]:
        reached = False

        def reach(_: torch.Tensor) -> None:
            nonlocal reached
            if not reached:
                reached = True
                self._outputs_left -= 1
            self._begin_seen(_)

        return reach

    def _begin_seen(self, _: torch.Tensor) -> None:
        task = running_backward()
        if task != self._task:
            self._begin(task)

    def _begin_unseen(self, _: torch.Tensor) -> None:
        if self._state in (State.EXPECTING, State.INCOMPLETE):
            self._begin(running_backward())

    def _begin(self, task: int) -> None:
        self._task = task
        self._state = _AFTER_BEGIN[self._state]
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    # - While it runs

    def _count_hook(self, index: int, at: int) -> Callable[[torch.Tensor], None]:
        countdown, backward = self._countdown, State.BACKWARD  # this runs once for each parameter

        def count(param: torch.Tensor) -> None:
            if self._state is not backward:
                self._begin_unseen(param)
                if self._state is not backward:
                    return  # reduced with all others when it ends, if at all
            left = countdown.count(index, at)
            if left == 0 and not self._recording:
                self._start_full_buckets()
            elif left < 0:
                name = self._gradients.names[index]
                raise RuntimeError(f"{self._me()}: {late_gradient_text(name, self._static_graph)}")

        return count

    def _start_full_buckets(self) -> None:
        self._gradients.fill_absent()
        while self._countdown.may_start():
            if not self._averager.start_early(self._countdown.next):
                return  # a hook of the user's took a gradient away, which is an error when backward ends
            self._countdown.next += 1

    # - How it ends

    def _end(self) -> None:
        started = time.perf_counter()
        self._task = NO_BACKWARD
        try:
            self._average()
            if self._state is State.IDLE:
                self._reductions += 1
                step_params(self._stepped)
        except BaseException as error:
            self._state = State.IDLE  # the error is raised once, here, and not again by the next forward
            self._averager.abandon()
            if isinstance(error, CollectiveError):
                add_context(error, averaging_context(self._module_name, self._reductions + 1, self.forwards))
            raise
        finally:
            self.wait_s += time.perf_counter() - started

    def _average(self) -> None:
        """Averages what has not been averaged yet, and says in the state whether that was everything."""
        is_awaited = self._state not in (State.IDLE, State.REPEATING)
        if self._recording and not self._record():
            # torch.autograd.grad went to other tensors than parameters, whose backward may follow.
            self._state = State.EXPECTING if is_awaited else State.IDLE
            return
        self._gradients.fill_absent()
        if self._find_unused:
            self._gradients.take_present(self._group)
        first = self._countdown.next if self._state is State.BACKWARD else 0
        if self._averager.average_from(first, self._copy_shared):
            self._state = State.IDLE
            return
        unused = self._unused_at_first
        if unused and self._outputs_left == 0 and unused.issuperset(self._gradients.missing()):
            self._raise_missing("this backward")  # no other backward can bring what forward did not use
        self._state = State.INCOMPLETE if is_awaited else State.IDLE

    def _record(self) -> bool:
        """Learns from the first backward of a static graph what to expect; returns whether it was one."""
        anywhere = self._gradients.settle_present(self._group)
        if not any(anywhere):
            return False
        self._recording = False
        self._countdown.learn(anywhere)
        return True

    def _raise_missing(self, which: str) -> None:
        names, missing = self._gradients.names, self._gradients.missing()
        named = zip(names, self._gradients.params, strict=True)
        frozen = {name for name, param in named if name in missing and not param.requires_grad}
        text = missing_gradient_text(which, missing, frozen, len(names), self._static_graph)
        raise RuntimeError(f"{self._me()}: {text}")

    def _me(self) -> str:
        return f"rank {self._group.ranks[self._group.rank()]}"
