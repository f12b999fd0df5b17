"""Notices that gradients which are not the averages of all ranks were changed, as by torch's clip_grad_norm_."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from paceline.group.eager import eager

_FEW = 4  # parameters, which torch's clip_grad_norm_ changes with all others


class ClippingWatch:
    """Warns once if somebody writes to gradients between a backward and the step.

    Args:
        named: parameters by name.
        me: this rank, for the message.
        what_they_are: what a parameter's gradient is before the step.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], me: str, what_they_are: str) -> None:
        self._named = dict(named)
        self._me = me
        self._what_they_are = what_they_are
        self._versions: dict[str, int] = {}  # of the gradients when a backward left them
        self._has_warned = False
        self._handles: list[RemovableHandle] = []

    def follow_backwards(self) -> None:
        """Notes a few of the gradients whenever autograd has added to them."""
        every = len(self._named) // _FEW + 1
        for name, param in list(self._named.items())[::every]:
            if param.requires_grad and param.is_leaf:
                hook = partial(_note_for, weakref.ref(self), name)  # which does not keep the model
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def note(self) -> None:
        """Notes all gradients as they are now."""
        for name, param in self._named.items():
            self._note(name, param)

    def close(self) -> None:
        """Ends `follow_backwards`; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check(self) -> None:
        """Warns, the first time, if a gradient was written to since it was noted; what follows may be rightly done."""
        for name, version in self._versions.items():
            gradient = self._named[name].grad
            if gradient is not None and gradient._version > version and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._me}: the gradient of {name!r} was changed between backward and step(), where it is "
                    f"{self._what_they_are}. If torch.nn.utils.clip_grad_norm_ did that, each rank has clipped by "
                    "another norm: call optimizer.clip_grad_norm_(max_norm) instead, which clips by that of the "
                    "averages. Only a factor that is the same on every rank does no harm",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._versions.clear()

    def _note(self, name: str, param: torch.Tensor) -> None:
        if param.grad is None:
            self._versions.pop(name, None)
        else:
            self._versions[name] = param.grad._version


@eager
def _note_for(watch: weakref.ref[ClippingWatch], name: str, param: torch.Tensor) -> None:
    held = watch()
    if held is not None:
        held._note(name, param)
