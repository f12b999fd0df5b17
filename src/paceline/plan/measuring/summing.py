"""Sums up what was noted of a script's steps: the calibration without its links."""

from __future__ import annotations

import datetime
import os
import resource
import socket
from collections.abc import Sequence
from importlib import metadata

import torch
from torch import nn

from paceline import _core
from paceline.parallel.ddp.arguments import DEFAULT_BUCKET_CAP_MB
from paceline.parallel.ddp.buckets import MIB, caps_of
from paceline.parallel.ddp.module import DistributedDataParallel
from paceline.plan.calibration import VERSION, Calibration, Gradient, Links, Memory, Origin
from paceline.plan.measuring.notes import StepNotes, forwards_of, ready_of, samples_of, times_of
from paceline.plan.measuring.watching import StepWatch

LEFT_OUT = 3
"""Steps at the beginning that do not count, in which caches and the allocator still grow."""


def calibration_of(watch: StepWatch, links: Links, command: Sequence[str], together: int) -> Calibration:
    """Returns the calibration of the script that was watched.

    Args:
        watch: what was noted.
        links: those that were measured before.
        command: the script and its arguments.
        together: how many ranks of this machine ran the script at the same time.

    Raises:
        TooFewStepsError: the script has not trained for long enough.
    """
    steps = watch.steps[LEFT_OUT:]
    wrapped = next((root for root in watch.roots if isinstance(root, DistributedDataParallel)), None)
    caps = caps_of(DEFAULT_BUCKET_CAP_MB * MIB) if wrapped is None else wrapped._bucket_caps
    return Calibration(
        version=VERSION,
        origin=Origin(
            tuple(command),
            datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            socket.gethostname(),
            _core.usable_cores(),
            torch.get_num_threads(),
            together,
            {"torch": str(torch.__version__), "paceline": metadata.version("paceline")},
        ),
        times=times_of(steps),
        step_s=tuple(step.seconds for step in steps),
        samples=samples_of(steps),
        forwards=forwards_of(steps),
        gradients=_gradients(watch.roots, steps),
        bucket_nbytes=caps,
        overlaps=wrapped is not None and wrapped.overlap,
        buffer_nbytes=_buffer_nbytes(wrapped),
        memory=_memory(watch),
        links=links,
    )


def _gradients(roots: Sequence[nn.Module], steps: Sequence[StepNotes]) -> tuple[Gradient, ...]:
    ready = ready_of(steps)
    return tuple(
        Gradient(name, param.nbytes, str(param.dtype).removeprefix("torch."), ready[name])
        for root in roots
        for name, param in root.named_parameters()
        if name in ready
    )


def _buffer_nbytes(wrapped: DistributedDataParallel | None) -> int:
    if wrapped is None or not wrapped.forward_sync_buffers:
        return 0
    return sum(buffer.nbytes for buffer in wrapped.module.buffers())


def _memory(watch: StepWatch) -> Memory:
    params = {id(param): param for root in watch.roots for param in root.parameters()}
    parameter_nbytes = sum(param.nbytes for param in params.values())
    gradient_nbytes = sum(param.nbytes for param in params.values() if param.requires_grad)
    optimizer_nbytes = sum(
        value.nbytes
        for optimizer in watch.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    other = max(0, peak - parameter_nbytes - gradient_nbytes - optimizer_nbytes)
    return Memory(parameter_nbytes, gradient_nbytes, optimizer_nbytes, other)


def reduction_s_per_byte() -> float:
    """Returns how long it takes this core to add a byte to a sum, as the engine measures it."""
    nbytes = 1 << 20
    return _core.time_reduction(nbytes) / nbytes


def world_of_one(local_ranks: int) -> dict[str, str]:
    """Returns the variables with which `init_process_group` makes a world of this process alone.

    LOCAL_WORLD_SIZE stays that of the machine, since `DistributedDataParallel` decides by it whether a core is spare.
    """
    from paceline.launch.environment import free_port

    return {
        "RANK": "0",
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"),
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
