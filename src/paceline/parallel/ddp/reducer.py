"""Averages gradients over the ranks: while backward still computes others, or when it ends.

That a backward began is seen at forward's outputs, and it ends with a callback of the autograd engine. A bucket that
may be reduced early has a hook on each of its parameters, which count it down; full buckets go, strictly in order, to
the group's progress thread. Everything else, and always the last bucket, is reduced on this thread when backward ends
and needs no hooks.

Averaging what is averaged already changes nothing. So a backward that follows the one that was reduced (of a retained
graph, or of the other of two forwards) is answered by averaging all gradients again, and ends right.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import CollectiveError
from paceline.group.process_group import ProcessGroup
from paceline.parallel.ddp.error_text import AFTER_AN_ERROR, add_place, say_averaging, say_late, say_missing
from paceline.parallel.ddp.exchange import Exchange
from paceline.parallel.ddp.graph import NO_BACKWARD, find_tensors, in_backward, running_backward, used_parameters
from paceline.parallel.ddp.members import Members


class Reducer:
    """Averages the gradients of a module over the ranks of `group`.

    Args:
        members: of the module.
        bucket_cap_bytes: how many bytes of gradients are reduced together.
        group: the ranks.
        name: of the module's class, for messages.
        find_unused: parameters may stay without a gradient.
        static_graph: the first backward shows how often each parameter gets a gradient in the others, and which stay
            without.
        overlap: reduce full buckets while backward goes on; the same on every rank.
    """

    def __init__(
        self,
        members: Members,
        bucket_cap_bytes: int,
        group: ProcessGroup,
        *,
        name: str,
        find_unused: bool,
        static_graph: bool,
        overlap: bool,
    ) -> None:
        self.wait_s = 0.0
        self.forwards = 0  # whose backward reduces
        self._reductions = 0
        self._module_name = name
        self.exchange = Exchange(members, bucket_cap_bytes, group)
        self._params = self.exchange.params
        self._names = self.exchange.names
        self._buckets = buckets = self.exchange.buckets
        self._group = group
        self._static_graph = static_graph
        self._learning = static_graph
        self._find_unused = find_unused and not static_graph
        # Which parameters a backward left out is known when it ends.
        self._early = max(0, len(buckets) - 1) if overlap and not self._find_unused else 0
        self._expected = [1] * len(self._params)  # gradients that a backward brings to each parameter
        self._full = [len(bucket.params) for bucket in buckets]

        self._armed = False  # a forward asked for a reduction that is not complete
        self._backwards = 0  # that began since then
        self._task = NO_BACKWARD  # the engine's number of the backward that runs
        self._left = list(self._full)
        self._counts = [0] * len(self._params)
        self._next = 0  # the first bucket not handed over
        self._wary = False  # the user may hold tensors that share memory with gradients
        self._outputs_left = 0  # that no backward has reached
        self._unused_at_first: set[str] | None = None  # what the first forward left out

        self._hooks: list[RemovableHandle] = []
        for at in range(self._early):
            for index in buckets[at].params:
                self._add_hook(self._params[index], self._count_hook(index, at))
        # For a backward that does not come through forward's outputs: it most likely ends here.
        self._add_hook(self._params[0], self._begin_unseen)
        self._sees_outputs = True

    def _add_hook(self, param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Takes its hooks off the parameters; idempotent."""
        self._armed = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def expect(self, output: object, wary: bool) -> None:
        """The backward of `output`, what forward returned, reduces.

        Args:
            output: tensors in any nest.
            wary: forward's inputs require gradients, which may share memory with those of parameters.
        """
        self.forwards += 1
        if not self._armed:
            self._armed = True
            self._backwards = 0
            self._task = NO_BACKWARD
            self._left = list(self._full)
            self._counts = [0] * len(self._params)
            self._next = 0
            self._wary = False
            self._outputs_left = 0
        outputs = [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
        self._wary = self._wary or wary
        self._outputs_left += len(outputs)
        for tensor in outputs:
            tensor.register_hook(self._output_hook())
        if self._unused_at_first is None:
            self._unused_at_first = set()
            if outputs and not (self._find_unused or self._static_graph):
                used = used_parameters(outputs)
                named = zip(self._names, self._params, strict=True)
                self._unused_at_first.update(name for name, param in named if id(param) not in used)
        if not outputs and self._sees_outputs:
            self._sees_outputs = False
            for param in self._params:
                self._add_hook(param, self._begin_unseen)

    def is_recomputing(self) -> bool:
        """Whether a backward calls forward again, for outputs that were expected before.

        With `use_reentrant=True` nothing was expected: the first forward was made without gradients.
        """
        return in_backward() and (self._armed or running_backward() == self._task)

    def follow(self, output: object) -> None:
        """A backward of `output`, which was recomputed, reduces too if there is one: that of a reentrant checkpoint.

        Otherwise what was recomputed serves the backward that runs, which reduces as it would have.
        """
        for tensor in find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._begin_seen)

    def awaits_backward(self) -> bool:
        """Whether the latest forward has had no backward."""
        return self._armed and self._backwards == 0

    def require_complete(self) -> None:
        """Raises if the latest backward left gradients unreduced.

        Raises:
            RuntimeError: names the parameters without a gradient, and the fix.
        """
        if not self._armed or self._backwards == 0:
            return
        if self._task != NO_BACKWARD:
            raise RuntimeError(f"{self._me()}: {AFTER_AN_ERROR}")
        self._raise_missing("the last backward")

    def _raise_missing(self, which: str) -> None:
        missing = self.exchange.missing()
        frozen = {n for n, p in zip(self._names, self._params, strict=True) if n in missing and not p.requires_grad}
        told = say_missing(which, missing, frozen, len(self._names), self._static_graph)
        raise RuntimeError(f"{self._me()}: {told}")

    def _me(self) -> str:
        return f"rank {self._group.me.rank}"

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
        if self._armed and self._task == NO_BACKWARD:
            self._begin(running_backward())

    def _begin(self, task: int) -> None:
        self._task = task
        self._backwards += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _count_hook(self, index: int, at: int) -> Callable[[torch.Tensor], None]:
        def count(param: torch.Tensor) -> None:
            if not self._armed:
                return
            if self._task == NO_BACKWARD:
                self._begin_unseen(param)
            if self._backwards != 1:
                return  # reduced when it ends, with all others
            self._counts[index] += 1
            if self._counts[index] == self._expected[index]:
                self._left[at] -= 1
                if self._left[at] == 0 and not self._learning:
                    self._hand_over()
            elif at < self._next:
                self._raise_late(index)

        return count

    def _raise_late(self, index: int) -> None:
        raise RuntimeError(f"{self._me()}: {say_late(self._names[index], self._static_graph)}")

    def _hand_over(self) -> None:
        """Starts the reduction of the full buckets that may go early, in order."""
        self.exchange.fill_absent()
        while self._next < self._early and self._left[self._next] == 0:
            if not self.exchange.start_early(self._next):
                return  # a hook of the user's took a gradient away; told when backward ends
            self._next += 1

    def _end(self) -> None:
        """At the end of a backward."""
        started = time.perf_counter()
        self._task = NO_BACKWARD
        try:
            self._complete()
            if not self._armed:
                self._reductions += 1
                self.exchange.step()
        except BaseException as error:
            self._armed = False  # the error is told once, here
            self.exchange.forget()
            if isinstance(error, CollectiveError):
                add_place(error, say_averaging(self._module_name, self._reductions + 1, self.forwards))
            raise
        finally:
            self.wait_s += time.perf_counter() - started

    def _complete(self) -> None:
        if self._learning:
            self._learn()
        self.exchange.fill_absent()
        if self._find_unused:
            self.exchange.take_present()
        first = self._next if self._armed and self._backwards == 1 else 0
        if self.exchange.reduce_rest(first, self._wary):
            self._armed = False
            return
        known = self._unused_at_first
        if known and self._outputs_left == 0 and known.issuperset(self.exchange.missing()):
            self._raise_missing("this backward")
        # Otherwise another backward may bring the others; if not, the next forward tells.

    def _learn(self) -> None:
        """How backward goes in this static graph."""
        everybodys = self.exchange.settle_present()
        if not any(everybodys):
            self._backwards = 0  # torch.autograd.grad, to other tensors; a backward may follow
            return
        self._learning = False
        self._expected = list(self._counts)
        for at, bucket in enumerate(self._buckets):
            self._full[at] = sum(self._expected[index] > 0 for index in bucket.params if everybodys[index])

    def shadow(self) -> None:
        """Takes part, with zeros, in the reduction of a backward that other ranks make; leaves their average."""
        self._armed = False
        self._counts = [1] * len(self._params)
        self.exchange.same_batches.look_away()
        nothing = [None] * len(self._params)
        self.exchange.set_gradients(nothing if self._find_unused else self.exchange.zeros())
        self._complete()
