"""Passes on what `paceline.log` records to TensorBoard, Weights & Biases or MLflow, which are the user's own objects.

Nothing of them is imported here, apart from MLflow when its sink is made without a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from paceline.record.steps import STEPS
from paceline.record.values import listeners


class Sink(Protocol):
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


def log_to(sink: Sink | None) -> None:
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
