"""The arguments of DiLoCo: which it refuses, and what the outer optimizer gets instead of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.group.wire import WireKind
from paceline.parallel.local.course import Rhythm
from paceline.parallel.one_copy.optimizer import SharedModelOptimizer


def choose_delay(every: int, fragments: int, delay: int | None) -> int:
    """Returns the delay of results: if None, half the time until the next fragment's exchange begins."""
    return every // (2 * fragments) if delay is None and fragments > 0 else delay or 0


def wrong_rhythm_text(rhythm: Rhythm, mix: float, grace_s: float | None, params: int) -> str | None:
    """Returns what is wrong with the numbers that say how often and how late fragments are exchanged; None if nothing.

    Args:
        rhythm: when fragments are exchanged.
        mix: which share of its own parameters a rank keeps.
        grace_s: how long late ranks are waited for.
        params: the number of parameters that are trained.
    """
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
    """Returns what is wrong with the optimizers; None if nothing."""
    for name, given in (("inner", inner), ("outer", outer)):
        if given is not None and not isinstance(given, Optimizer):
            return (
                f"the {name} optimizer is a {type(given).__name__}; it must be a torch.optim.Optimizer that was made "
                "with the model's parameters"
            )
    if isinstance(inner, SharedModelOptimizer):
        return (
            "the inner optimizer is a SharedModelOptimizer, whose ranks have one copy of the parameters on each host; "
            "the ranks of DiLoCo need parameters of their own"
        )
    if inner is outer:
        return "the inner and the outer optimizer are the same object; make two"
    if outer.state:
        return "the outer optimizer has made steps already; make a new one, and load its state with load_state_dict"
    known = {id(param) for param in params}
    has = {id(param) for group in outer.param_groups for param in group["params"]}
    if missing := known - has:
        return (
            f"the outer optimizer lacks {len(missing)} of the {len(known)} parameters that are trained; make it with "
            "model.parameters()"
        )
    if inner is not None:
        trained = [param for group in inner.param_groups for param in group["params"] if param.requires_grad]
        strange = sum(id(param) not in known for param in trained)
        if strange:
            return (
                f"the inner optimizer has {strange} parameters that are not the model's; the ranks would not agree "
                "about them. Pass the module that holds all trained parameters"
            )
    return None


def wrong_parameters_text(named: Sequence[tuple[str, nn.Parameter]], wire: object) -> str | None:
    """Returns which parameter cannot be exchanged, and why; None if all can.

    Args:
        named: the parameters that are trained.
        wire: how outer gradients travel.
    """
    if wire is not None and wire not in get_args(WireKind):
        return f"wire is {wire!r}; it must be one of {', '.join(get_args(WireKind))}, or None to send what there is"
    for name, param in named:
        if not param.is_floating_point():
            return f"the parameter {name!r} has {param.dtype}; only floating-point parameters can be exchanged"
        if param.is_meta:
            return f"the parameter {name!r} is on the meta device; give the model memory before"
        if wire is not None and param.dtype == torch.float64:
            return f"the parameter {name!r} has double precision, which wire={wire!r} cannot round; leave wire out"
    return None


def hand_over(outer: Optimizer, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Gives the outer optimizer the copies in place of the parameters; its groups and their options stay."""
    copies = {id(param): copy for param, copy in pairs}
    for group in outer.param_groups:
        group["params"] = [copies[id(param)] for param in group["params"] if id(param) in copies]
