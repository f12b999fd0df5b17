"""Logging of scalar metrics, such as the loss, with a warning if a value becomes NaN or infinite.

Sinks forward the metrics to TensorBoard, Weights & Biases or MLflow. The user creates the writer, run or client; this
module imports none of these libraries, except MLflow if its sink is created without a client.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol, SupportsFloat

from paceline import _core
from paceline.comm.record.layout import EventKind
from paceline.comm.record.recorder import known_rank
from paceline.comm.record.spans import STEPS, note_event, number_of

_was_finite: dict[str, bool] = {}  # for each name, False once a warning has been issued
_listeners: list[Callable[[Mapping[str, float]], None]] = []  # called with the metrics passed to each call of `log`


def log(**values: SupportsFloat) -> None:
    """Records scalar metrics, such as the loss and the learning rate, for the current step.

    Numbers and one-element tensors are converted to a double immediately. For a tensor on a GPU, this call blocks until
    the GPU has computed the value, so performance-critical loops should log such values only every few steps. If a
    metric that was finite before, or whose name contains "loss", becomes NaN or infinite, a warning is issued once.

        paceline.log(loss=loss, lr=scheduler.get_last_lr()[0])

    Raises:
        TypeError: a value is neither a number nor a one-element tensor.
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        detach = getattr(value, "detach", None)
        try:
            number = float(value if detach is None else detach())
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"paceline.log: {name} is a {type(value).__name__} that cannot be converted to one number ({error}); "
                "pass a number or a tensor of one element"
            ) from None
        _core.record_value(number_of(name), number)
        numbers[name] = number
        if math.isfinite(number):
            _was_finite.setdefault(name, True)
        elif _was_finite.get(name, "loss" in name.lower()):
            _was_finite[name] = False
            _warn_not_finite(name, number)
    for listener in _listeners:
        listener(numbers)


def _warn_not_finite(name: str, number: float) -> None:
    step = STEPS.number
    note_event(int(EventKind.NOT_FINITE), name, step)
    rank = known_rank()
    where = "" if rank is None else f"rank {rank}: "
    when = f"in step {step}" if step else "before the first step"
    warnings.warn(
        f"{where}{name} is {number} {when}, for the first time. Look at this rank's batch of that step; if all ranks "
        "report this, the parameters were already corrupted, or the learning rate is too high",
        RuntimeWarning,
        stacklevel=3,
    )


class LogSink(Protocol):
    """Destination for logged metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics passed to one call of `log`, by name; `step` is the current training step."""


class TensorBoardLog:
    """Writes to a `SummaryWriter` from torch.utils.tensorboard or tensorboardX.

    paceline.log_to(paceline.TensorBoardLog(SummaryWriter("runs/digits")))

    Args:
        writer: the writer, which the caller closes.
        prefix: a prefix for each metric's name.
    """

    def __init__(self, writer: Any, prefix: str = "") -> None:
        self._writer = writer
        self._prefix = prefix

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a scalar for each metric."""
        for name, value in values.items():
            self._writer.add_scalar(f"{self._prefix}{name}", value, step)


class WandbLog:
    """Writes to a Weights & Biases run.

    paceline.log_to(paceline.WandbLog(wandb.init(project="digits")))

    Args:
        run: the run that `wandb.init` returned.
        prefix: a prefix for each metric's name.
    """

    def __init__(self, run: Any, prefix: str = "") -> None:
        self._run = run
        self._prefix = prefix

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the metrics with the step."""
        self._run.log({f"{self._prefix}{name}": value for name, value in values.items()}, step=step)


class MlflowLog:
    """Writes to MLflow's active run, or to a `client` that provides `log_metrics(values, step=...)`.

    paceline.log_to(paceline.MlflowLog())

    Raises:
        ImportError: `client` is not given, and MLflow is not installed.
    """

    def __init__(self, client: Any = None) -> None:
        if client is None:
            try:
                client = import_module("mlflow")
            except ImportError:
                raise ImportError("MlflowLog needs MLflow, which is not installed: pip install mlflow") from None
        self._client = client

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the metrics for the step."""
        self._client.log_metrics(dict(values), step=step)


def log_to(sink: LogSink | None) -> None:
    """Adds a sink for the metrics that this process logs; None removes all sinks.

    Call this function on one rank only, because otherwise every rank logs the same curve. The step passed to the sink
    is the recording's current step or, in a program without recorded steps, the number of calls to `log`; see
    docs/observe.md. Errors raised by a sink propagate to the caller of `log`.

        if paceline.get_rank() == 0:
            paceline.log_to(paceline.TensorBoardLog(SummaryWriter()))
    """
    if sink is None:
        _listeners.clear()
        return
    calls = 0

    def listen(values: Mapping[str, float]) -> None:
        nonlocal calls
        calls += 1
        sink.write(STEPS.number or calls, values)

    _listeners.append(listen)
