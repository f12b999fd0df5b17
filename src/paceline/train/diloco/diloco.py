"""DiLoCo and LocalSGD: ranks train independently and average outer gradients every few steps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.group.compression import WireKind
from paceline.comm.group.default import given_or_default
from paceline.comm.group.init import new_group
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.spans import STEPS
from paceline.train.diloco.exchange_scheduler import BeginExchange, ExchangeInterval, ExchangeScheduler
from paceline.train.diloco.exchanges import BackgroundExchanges, ExchangeResult, Exchanges, OuterAverager
from paceline.train.diloco.outer_parameters import ExchangeContent, OuterParameters, other_buffers
from paceline.train.shared_model.shared_model_optimizer import SharedModelOptimizer
from paceline.train.zero.optimizer_state import load_optimizer
from paceline.train.zero.partitioned_optimizer import synchronize_parameters


def wrong_rhythm_text(rhythm: ExchangeInterval, mix: float, grace_s: float | None, params: int) -> str | None:
    """Returns the error message for an invalid frequency, delay, mix or grace period, or None if all are valid."""
    if params == 0:
        return "no parameter of the model requires a gradient, so there is nothing to exchange"
    if rhythm.every < 1:
        return f"every is {rhythm.every}; it must be the number of inner steps between two exchanges, at least 1"
    if not 1 <= rhythm.fragments <= min(rhythm.every, params):
        return (
            f"fragments is {rhythm.fragments}; it must be at least 1, and at most the number of inner steps of a round "
            f"({rhythm.every}) and of trained parameters ({params})"
        )
    if not 0 <= rhythm.delay < rhythm.every:
        return (
            f"delay is {rhythm.delay}; it must be a number of inner steps from 0 to {rhythm.every - 1}, so that a "
            "fragment's result is used before it is exchanged again"
        )
    if not 0 <= mix < 1:
        return f"mix is {mix}; it must be at least 0, for the outer parameters alone, and less than 1"
    if grace_s is not None and not grace_s > 0:
        return f"grace_s is {grace_s}; it must be a positive number of seconds, or None to wait for all ranks"
    return None


def wrong_optimizers_text(inner: Optimizer | None, outer: Optimizer, params: Sequence[nn.Parameter]) -> str | None:
    """Returns the error message for invalid optimizers, or None if both are valid."""
    for name, given in (("inner", inner), ("outer", outer)):
        if given is not None and not isinstance(given, Optimizer):
            return (
                f"the {name} optimizer is a {type(given).__name__}; it must be a torch.optim.Optimizer that was "
                "created with the model's parameters"
            )
    if isinstance(inner, SharedModelOptimizer):
        return (
            "the inner optimizer is a SharedModelOptimizer, whose ranks have one copy of the parameters on each host; "
            "the ranks of DiLoCo need parameters of their own"
        )
    if inner is outer:
        return "the inner and the outer optimizer are the same object; create two"
    if outer.state:
        return "the outer optimizer has already made steps; create a new one, and load its state with load_state_dict"
    known = {id(param) for param in params}
    has = {id(param) for group in outer.param_groups for param in group["params"]}
    if missing := known - has:
        return (
            f"the outer optimizer lacks {len(missing)} of the {len(known)} parameters that are trained; create it with "
            "model.parameters()"
        )
    if inner is not None:
        trained = [param for group in inner.param_groups for param in group["params"] if param.requires_grad]
        foreign = sum(id(param) not in known for param in trained)
        if foreign:
            return (
                f"the inner optimizer has {foreign} parameters that are not the model's; the ranks would not agree "
                "about them. Pass the module that holds all trained parameters"
            )
    return None


def wrong_parameters_text(named: Sequence[tuple[str, nn.Parameter]], wire: object) -> str | None:
    """Returns the error message for an invalid `wire` or a parameter that cannot be exchanged, or None."""
    if wire is not None and wire not in get_args(WireKind):
        return (
            f"wire is {wire!r}; it must be one of {', '.join(get_args(WireKind))}, or None to send the values unchanged"
        )
    for name, param in named:
        if not param.is_floating_point():
            return f"the parameter {name!r} has {param.dtype}; only floating-point parameters can be exchanged"
        if param.is_meta:
            return f"the parameter {name!r} is on the meta device; materialize the model first"
        if wire is not None and param.dtype == torch.float64:
            return f"the parameter {name!r} has double precision, which wire={wire!r} cannot round; leave wire out"
    return None


class DiLoCo:
    """Trains the model independently on each rank and averages over the ranks every few steps while training continues.

    Every rank trains the model with its `inner` optimizer, without communication. Each fragment (a subset of the
    parameters) is exchanged once every `every` steps. An exchange averages, over the ranks, the fragment's *outer
    gradient*: the outer parameters minus the rank's parameters. The `outer` optimizer then updates the outer parameters
    with the mean, and the rank continues from the updated parameters. This is DiLoCo (Douillard et al. 2023) or, with
    several fragments, Streaming DiLoCo (Douillard et al. 2025). It sends about `every` times less data than data
    parallel training, so a slow network suffices. After each exchange the outer parameters are bitwise equal on all
    ranks.

    Call `step` after each inner step and `finish` at the end. Gradient accumulation, mixed precision with a GradScaler,
    and learning rate schedulers for either optimizer work as in single-process training.

    Args:
        model: the model, with the same parameter names and shapes on every rank. Rank 0's parameters and buffers are
            copied to all ranks. The ranks on a host may wrap the model in a DistributedDataParallel if `process_group`
            contains one rank per host.
        inner: the optimizer with which each rank trains.
        outer: a new optimizer for `model.parameters()`, such as `torch.optim.SGD(model.parameters(), lr=0.7,
            momentum=0.9, nesterov=True)`. DiLoCo replaces the optimizer's parameters with copies; its parameter groups
            and learning rate scheduler remain valid.
        every: the number of inner steps between two exchanges of the same fragment.
        fragments: the number of fragments, of about equal size, that are exchanged in turn.
        wire: the format to which outer gradients are rounded between hosts, with error feedback: "bf16", "int8" or
            "int4". If None, outer gradients are not rounded.
        delay: the number of inner steps from the start of an exchange until its result is used. The exchange overlaps
            with these steps, and the rank's progress during them is added to the result (Zhou et al. 2020, DaSGD). The
            default is half the number of steps between two exchanges.
        mix: the weight of the parameters that the rank had at the start of the exchange, at least 0 and less than 1.
            The outer parameters have the weight `1 - mix`.
        grace_s: the time in seconds that an exchange waits for other ranks after the first rank has arrived. A late
            rank is excluded, and its progress is included in the fragment's next exchange. If None, an exchange waits
            for all ranks. In either case, exchanges wait until every rank has called `step` for the first time.
        process_group: the process group of the ranks; if None, the default group.

    Raises:
        CollectiveMismatchError: models or arguments differ between ranks, or another rank failed to start; raised on
            every rank.
        ValueError: an argument is invalid.

    Example::

        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = paceline.DiLoCo(model, inner, outer, every=64, fragments=4, wire="int4")
        for inputs, targets in loader:
            inner.zero_grad()
            loss_function(model(inputs), targets).backward()
            inner.step()
            diloco.step()
        diloco.finish()
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | None,
        outer: Optimizer,
        every: int = 64,
        fragments: int = 1,
        wire: WireKind | None = None,
        *,
        delay: int | None = None,
        mix: float = 0.0,
        grace_s: float | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.process_group = group = given_or_default(process_group)
        self.module, self.inner, self.outer = model, inner, outer
        self.wire, self.grace_s = wire, grace_s
        self._mix, self._wait_s = mix, 0.0
        self._before: dict[int, list[torch.Tensor]] = {}  # this rank's parameters at the beginning of each exchange
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        self._names = [name for name, _ in named]
        params = [param for _, param in named]
        if delay is None:
            delay = every // (2 * fragments) if fragments > 0 else 0  # half the steps between two exchanges
        rhythm = ExchangeInterval(every, fragments, delay)
        wrong = (
            wrong_rhythm_text(rhythm, mix, grace_s, len(params))
            or wrong_optimizers_text(inner, outer, params)
            or wrong_parameters_text(named, wire)
        )
        compared: dict[str, object] = {
            "every": every,
            "fragments": fragments,
            "wire": wire,
            "delay": rhythm.delay,
            "grace_s": grace_s,
            "outer": type(outer).__name__,
        }
        problem = None if wrong is None else ValueError(f"rank {group.me.rank}: {wrong}")
        synchronize_parameters(model, [{"params": params}], compared, group, problem)
        self._scheduler = ExchangeScheduler(rhythm)
        self.outer_module = OuterParameters(params, fragments)
        self.content = ExchangeContent(model, self.outer_module, fragments)
        copies = {id(param): copy for param, copy in self.outer_module.pairs()}
        for options in outer.param_groups:
            options["params"] = [copies[id(param)] for param in options["params"] if id(param) in copies]
        self._exchanges = Exchanges()
        if group.size() > 1:
            own = self._new_group("outer gradients")
            arrivals = self._new_group("arrivals for outer gradients")
            averaging = OuterAverager(wire)
            exchanges = BackgroundExchanges(own, arrivals, grace_s, averaging, rhythm.fragment, self.content.blank)
            weakref.finalize(self, exchanges.close).atexit = False
            self._exchanges = exchanges

    @property
    def rhythm(self) -> ExchangeInterval:
        """The frequency and delay of exchanges."""
        return self._scheduler.rhythm

    @property
    def steps(self) -> int:
        """The number of completed inner steps. A late rank adopts the step count of the other ranks."""
        return self._scheduler.steps

    def step(self) -> None:
        """Counts an inner step, starts the exchanges that are due, and applies the results that are due.

        Call this method after each step of the inner optimizer, even if a GradScaler has skipped that step.

        Raises:
            PeerLostError: a rank died.
            CollectiveTimeoutError: an exchange did not complete in time.
        """
        STEPS.begin(self, "local")
        self._proceed()
        self._scheduler.step()
        self._proceed()

    def finish(self) -> None:
        """Completes all exchanges and sets the parameters to their mean, which is bitwise equal on all ranks.

        Every rank must call this method, which waits for ranks that lag behind. Buffers that are not averaged are
        copied from the first rank. Training may continue afterward.
        """
        self._proceed()
        scheduler = self._scheduler
        for outcome in self._exchanges.leave(range(scheduler.used, scheduler.begun)):
            self._use(outcome)
            scheduler.used = outcome.exchange + 1
        scheduler.begun = scheduler.used
        for fragment in range(scheduler.rhythm.fragments):
            mean = self._exchanges.mean(fragment, self.content.offer(fragment))
            self.outer_module.step(fragment, mean[0], None)
            self.outer_module.reset(fragment, 0.0)
            self.content.set_buffers(mean)
        self._exchanges.copy_from_first(other_buffers(self.module))
        scheduler.steps = self._exchanges.most(scheduler.steps)

    @contextmanager
    def outer_parameters(self) -> Iterator[nn.Module]:
        """Returns a context in which the model's parameters are the outer parameters, which are equal on all ranks.

        Evaluate and save the model in this context. On exit, this rank's parameters are restored. Buffers do not
        change.
        """
        pairs = self.outer_module.pairs()
        with torch.no_grad():
            own = [param.clone() for param, _ in pairs]
            for param, copy in pairs:
                param.copy_(copy)
        try:
            yield self.module
        finally:
            with torch.no_grad():
                for (param, _), kept in zip(pairs, own, strict=True):
                    param.copy_(kept)

    def communication_wait_s(self) -> float:
        """Returns the total time in seconds that `step` has spent waiting for exchange results."""
        return self._wait_s

    def state_dict(self) -> dict[str, Any]:
        """Returns the outer parameters, the states of both optimizers, and the training progress.

        The call requires no communication, and any number of ranks can load the state of one rank. Save the result
        together with `model.state_dict()`, which contains this rank's own parameters. Exchanges in flight restart after
        loading.
        """
        copies = [copy.detach().clone() for _, copy in self.outer_module.pairs()]
        return {
            "parameters": dict(zip(self._names, copies, strict=True)),
            "outer": self.outer.state_dict(),
            "inner": None if self.inner is None else self.inner.state_dict(),
            "steps": self._scheduler.steps,
            "used": self._scheduler.used,
            "every": self._scheduler.rhythm.every,
            "fragments": self._scheduler.rhythm.fragments,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state before the first step or after `finish`; the state must be the same on every rank.

        `every` and `fragments` may differ from the values in the state.

        Raises:
            RuntimeError: exchanges are in flight.
            ValueError: the state was saved from a model with different parameters.
        """
        parameters = state["parameters"]
        if differ := sorted(set(parameters) ^ set(self._names)):
            me, where = self.process_group.me.rank, "there" if differ[0] in parameters else "here"
            raise ValueError(
                f"rank {me}: the state is of another model: {differ[0]!r} is a trained parameter only {where}"
            )
        rhythm, steps, used = self.rhythm, state["steps"], state["used"]
        if (state["every"], state["fragments"]) != (rhythm.every, rhythm.fragments):
            used = rhythm.begun_after(steps)
        self._exchanges.start(used)
        self._scheduler = ExchangeScheduler(rhythm, steps, used, used)
        self._before.clear()
        for name, (_, copy) in zip(self._names, self.outer_module.pairs(), strict=True):
            copy.copy_(parameters[name])
        load_optimizer(self.outer, state["outer"])
        if self.inner is not None and state["inner"] is not None:
            load_optimizer(self.inner, state["inner"])

    # - Methods for elastic jobs, whose set of ranks changes

    def exchange_by(self, exchanges: Exchanges) -> None:
        """Uses `exchanges` for all subsequent exchanges."""
        self._exchanges = exchanges

    def own_state(self) -> dict[str, Any]:
        """Returns the state that a new rank needs, except the outer parameters and the outer optimizer's state."""
        scheduler = self._scheduler
        return {
            "inner": None if self.inner is None else self.inner.state_dict(),
            "buffers": [buffer.detach() for buffer in self.module.buffers()],
            "course": [scheduler.steps, scheduler.begun, scheduler.used],
        }

    @torch.no_grad()
    def take_own_state(self, state: dict[str, Any]) -> None:
        """Loads the `own_state` of another rank and sets the parameters to the outer parameters."""
        if self.inner is not None and state["inner"] is not None:
            load_optimizer(self.inner, state["inner"])
        for buffer, value in zip(self.module.buffers(), state["buffers"], strict=True):
            buffer.copy_(value)
        self._scheduler = ExchangeScheduler(self.rhythm, *state["course"])
        self._before.clear()
        for fragment in range(self.rhythm.fragments):
            self.outer_module.reset(fragment, 0.0)

    def _new_group(self, use: str) -> ProcessGroup:
        group = self.process_group
        made = new_group(group.ranks, group.timeout, use_local_synchronization=True, group_desc=use)
        assert isinstance(made, ProcessGroup)
        return made

    def _proceed(self) -> None:
        """Starts exchanges that are due and applies results that are due."""
        self._scheduler.catch_up(self._exchanges.decided())
        while (action := self._scheduler.due()) is not None:
            if isinstance(action, BeginExchange):
                fragment = self.rhythm.fragment(action.exchange)
                if self.rhythm.delay:
                    self._before[action.exchange] = self.outer_module.trained(fragment)
                self._exchanges.begin(action.exchange, self.content.offer(fragment))
            else:
                began_s = time.perf_counter()
                outcome = self._exchanges.outcome(action.exchange)
                self._wait_s += time.perf_counter() - began_s
                self._use(outcome)
            self._scheduler.complete(action)

    def _use(self, outcome: ExchangeResult) -> None:
        """Updates the outer parameters with a result, and derives this rank's parameters from them."""
        fragment, outer = self.rhythm.fragment(outcome.exchange), self.outer_module
        before = self._before.pop(outcome.exchange, None)
        if not outcome.took_part:
            before = outer.outer(fragment)  # this rank's progress is kept for the next exchange
        outer.step(fragment, outcome.mean[0], self.outer)
        outer.reset(fragment, self._mix if outcome.took_part else 0.0, before)
        if outcome.took_part:
            self.content.set_buffers(outcome.mean)


class LocalSGD(DiLoCo):
    """Trains the model independently on each rank, and averages the parameters over the ranks every `every` steps.

    This is local SGD (Stich 2019), also known as periodic model averaging. It is equivalent to DiLoCo with plain SGD at
    a learning rate of 1 as the outer optimizer. With a delay of 0, all ranks continue from the mean.

    Args:
        model: see `DiLoCo`.
        inner: the optimizer with which each rank trains; if given, `state_dict` includes its state.
        every: the number of inner steps after which the parameters are averaged.
        fragments, wire, delay, mix, grace_s, process_group: see `DiLoCo`; the default delay is 0.

    Example::

        local = paceline.LocalSGD(model, every=16)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            local.step()
        local.finish()
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | None = None,
        every: int = 16,
        fragments: int = 1,
        wire: WireKind | None = None,
        *,
        delay: int = 0,
        mix: float = 0.0,
        grace_s: float | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        super().__init__(
            model,
            inner,
            outer,
            every,
            fragments,
            wire,
            delay=delay,
            mix=mix,
            grace_s=grace_s,
            process_group=process_group,
        )
