"""Records training events: steps, backward passes, gradient buckets and optimizer steps.

On an accelerator, forward passes, backward passes and optimizer steps are additionally recorded with device timestamps
(`EventKind.DEVICE`).
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from paceline import _core
from paceline.comm.engine.adapters.device_streams import AcceleratorEvent, is_capturing, record_current
from paceline.comm.engine.adapters.group_recorder import DEVICE_WATCH, clock_of
from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import STEPS, begin_event, number_of

_BACKWARD = int(EventKind.BACKWARD)
_BUCKET = int(EventKind.BUCKET)
_OPTIMIZER = int(EventKind.OPTIMIZER)
_STAMP = "_paceline_stamp"


class DevicePhases:
    """Records the phases of training steps, such as "backward", on one device.

    A phase lasts from its mark until the next mark, in device time. Phases must be marked in the order in which their
    work is enqueued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: deque[tuple[AcceleratorEvent, str, int]] = deque()
        self._open = 0  # the stamp of the device's current phase
        self._lock = threading.Lock()

    def mark(self, phase: str, step: int) -> None:
        """Marks the start of a phase after the work enqueued on the current stream; "" only ends the previous phase."""
        if not _core.is_recording() or is_capturing(self._device):
            return
        with self._lock:
            self._marks.append((record_current(self._device, timing=True), phase, step))
            is_first = len(self._marks) == 1
        if is_first:
            DEVICE_WATCH.add(self._poll, self._device)

    def _poll(self) -> bool:
        """Records the marks that the device has passed; returns whether any marks remain."""
        while self._marks and self._marks[0][0].done():
            event, phase, step = self._marks[0]
            tick = clock_of(self._device).tick_of(event)
            if self._open:
                _core.record_end_at(self._open, tick)
                self._open = 0
            if phase:
                index = self._device.index or 0
                self._open = _core.record_begin_at(EventKind.DEVICE, number_of(phase), index, step, tick)
            with self._lock:
                self._marks.popleft()
        with self._lock:
            return bool(self._marks)


@functools.cache
def phases_of(device: torch.device) -> DevicePhases:
    """Returns the `DevicePhases` for a device."""
    return DevicePhases(device)


class RecordedSteps:
    """Records the steps and backward passes of one wrapped module; `name` is the wrapper's name, such as "ddp"."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._phases = None if device.type == "cpu" else phases_of(device)
        self._is_new = True  # whether the next forward pass starts a new step
        self._backward = 0
        record_optimizers()

    def forward_begins(self) -> None:
        """Records a forward pass, and starts a new step if the previous step's gradients were averaged."""
        if self._is_new:
            self._is_new = False
            STEPS.begin(self, self._name)
        self._mark("forward")

    def backward_begins(self) -> None:
        """Records the start of a backward pass, when its first gradient is computed."""
        if not self._backward:
            self._backward = begin_event(_BACKWARD, self._name)
            self._mark("backward")

    def backward_ended(self, *, averaged: bool) -> None:
        """Records the end of a backward pass; if it averaged gradients, the next forward pass starts a new step."""
        _core.record_end(self._backward)
        self._backward = 0
        self._is_new = self._is_new or averaged
        self._mark("")

    def _mark(self, phase: str) -> None:
        if self._phases is not None:
            self._phases.mark(phase, STEPS.number)


class RecordedBuckets:
    """Records the progress of gradient buckets, from the computation of their gradients until they are averaged.

    `name` is the wrapper's name, such as "ddp".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stamps: dict[int, int] = {}

    def ready(self, bucket: int, nbytes: int) -> None:
        """Records that all gradients of a bucket have been computed; idempotent."""
        if bucket not in self._stamps:
            self._stamps[bucket] = begin_event(_BUCKET, self._name, bucket, nbytes)

    def sent(self, bucket: int) -> None:
        """Records that the reduction of a bucket has started."""
        _core.record_sent(self._stamps.get(bucket, 0))

    def done(self, bucket: int) -> None:
        """Records that a bucket has been averaged."""
        _core.record_end(self._stamps.pop(bucket, 0))

    def forget(self) -> None:
        """Closes events that a failed backward pass has left open."""
        for bucket in list(self._stamps):
            self.done(bucket)


@functools.cache
def record_optimizers() -> None:
    """Starts recording the steps of all optimizers in this process; idempotent."""
    optimizers.register_optimizer_step_pre_hook(_before_step)
    optimizers.register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        vars(optimizer)[_STAMP] = begin_event(_OPTIMIZER, type(optimizer).__name__)
        _mark_on_device(optimizer, "optimizer")


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _core.record_end(vars(optimizer).pop(_STAMP, 0))
        _mark_on_device(optimizer, "")


def _mark_on_device(optimizer: torch.optim.Optimizer, phase: str) -> None:
    param = next((param for group in optimizer.param_groups for param in group["params"]), None)
    if isinstance(param, torch.Tensor) and param.device.type not in ("cpu", "meta"):
        phases_of(param.device).mark(phase, STEPS.number)
