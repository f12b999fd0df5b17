"""The numbers that a program records, such as its loss, and the first of them that is not finite.

Passes on what `paceline.log` records to TensorBoard, Weights & Biases or MLflow, which are the user's own objects.

Nothing of them is imported here, apart from MLflow when its sink is made without a client.
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

_FINITE, _TOLD = "finite", "told"

_states: dict[str, str] = {}  # what is known of each name
listeners: list[Callable[[Mapping[str, float]], None]] = []
"""Called with the numbers of each `log`; `sinks.py` adds to them."""


def log(**values: SupportsFloat) -> None:
    """Records numbers by their names, such as the loss and the learning rate, with the current step.

    Numbers and tensors of one element are converted to a double at once. For a tensor on a GPU that waits until the GPU
    has computed it; a loop that must not wait logs such values every few steps. A warning names the first NaN or
    infinity of a number that was finite before, and of a loss.

        paceline.log(loss=loss, lr=scheduler.get_last_lr()[0])

    Raises:
        TypeError: a value is no number and no tensor of one element.
    """
    passed_on: dict[str, float] = {}
    for name, value in values.items():
        detach = getattr(value, "detach", None)
        try:
            number = float(value if detach is None else detach())
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"paceline.log: {name} is a {type(value).__name__} that cannot be one number ({error}); pass a number "
                "or a tensor of one element"
            ) from None
        _core.record_value(number_of(name), number)
        passed_on[name] = number
        state = _states.get(name)
        if math.isfinite(number):
            if state is None:
                _states[name] = _FINITE
        elif state is _FINITE or (state is None and "loss" in name.lower()):
            _states[name] = _TOLD
            _warn_not_finite(name, number)
    for listener in listeners:
        listener(passed_on)


def _warn_not_finite(name: str, number: float) -> None:
    step = STEPS.number
    note_event(int(EventKind.NOT_FINITE), name, step)
    rank = known_rank()
    where = "" if rank is None else f"rank {rank}: "
    when = f"in step {step}" if step else "before the first step"
    warnings.warn(
        f"{where}{name} is {number} {when}, for the first time. Look at this rank's batch of that step; if all ranks "
        "say so, the parameters were spoiled before, or the learning rate is too high",
        RuntimeWarning,
        stacklevel=3,
    )


class LogSink(Protocol):
    """Takes numbers by their names, with the training step in which they were logged."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of one `log`."""


class TensorBoardLog:
    """Writes to a `SummaryWriter` of torch.utils.tensorboard or of tensorboardX.

    paceline.log_to(paceline.TensorBoardLog(SummaryWriter("runs/digits")))

    Args:
        writer: the writer, which remains the caller's to close.
        prefix: what the names begin with.
    """

    def __init__(self, writer: Any, prefix: str = "") -> None:
        self._writer = writer
        self._prefix = prefix

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a scalar for each number."""
        for name, value in values.items():
            self._writer.add_scalar(f"{self._prefix}{name}", value, step)


class WandbLog:
    """Writes to a run of Weights & Biases.

    paceline.log_to(paceline.WandbLog(wandb.init(project="digits")))

    Args:
        run: what `wandb.init` returned.
        prefix: what the names begin with.
    """

    def __init__(self, run: Any, prefix: str = "") -> None:
        self._run = run
        self._prefix = prefix

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the numbers under the step."""
        self._run.log({f"{self._prefix}{name}": value for name, value in values.items()}, step=step)


class MlflowLog:
    """Writes to MLflow's active run, or to a `client` with the same `log_metrics(values, step=...)`.

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
        """Logs the numbers as metrics of the step."""
        self._client.log_metrics(dict(values), step=step)


def log_to(sink: LogSink | None) -> None:
    """Passes on to `sink` what this process logs from now on; None ends that for all sinks.

    Call it on one rank, or the same curve is drawn several times. The step is that of the recording, or counts the
    calls of `log` where nothing makes steps; see docs/observe.md. What a sink raises, `log` raises.

        if paceline.get_rank() == 0:
            paceline.log_to(paceline.TensorBoardLog(SummaryWriter()))
    """
    if sink is None:
        listeners.clear()
        return
    calls = 0

    def listen(values: Mapping[str, float]) -> None:
        nonlocal calls
        calls += 1
        sink.write(STEPS.number or calls, values)

    listeners.append(listen)
