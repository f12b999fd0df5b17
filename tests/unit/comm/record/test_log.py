"""Metrics that a program logs are passed on to the user's TensorBoard, W&B or MLflow."""

from __future__ import annotations

import sys

import pytest

import paceline


class Recorder:
    """Replaces a writer, a run or a client, and records its calls."""

    def __init__(self):
        self.calls = []

    def add_scalar(self, name, value, step):
        self.calls.append((name, value, step))

    def log(self, values, step):
        self.calls.append((values, step))

    def log_metrics(self, values, step):
        self.calls.append((values, step))


@pytest.fixture(autouse=True)
def no_sinks():
    yield
    paceline.log_to(None)


def test_each_number_becomes_a_scalar_of_tensorboard():
    writer = Recorder()
    paceline.log_to(paceline.TensorBoardLog(writer, prefix="train/"))
    paceline.log(loss=2.0, lr=0.5)
    paceline.log(loss=1.0)
    assert writer.calls == [("train/loss", 2.0, 1), ("train/lr", 0.5, 1), ("train/loss", 1.0, 2)]


def test_weights_and_biases_and_mlflow_get_all_numbers_at_once():
    run, client = Recorder(), Recorder()
    paceline.log_to(paceline.WandbLog(run))
    paceline.log_to(paceline.MlflowLog(client))
    paceline.log(loss=2.0, lr=0.5)
    assert run.calls == client.calls == [({"loss": 2.0, "lr": 0.5}, 1)]


def test_nothing_is_passed_on_after_the_sinks_are_gone():
    run = Recorder()
    paceline.log_to(paceline.WandbLog(run))
    paceline.log_to(None)
    paceline.log(loss=1.0)
    assert run.calls == []


def test_without_mlflow_its_sink_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match="pip install mlflow"):
        paceline.MlflowLog()


def test_a_real_writer_of_tensorboard_takes_the_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed; `make test` installs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        paceline.log_to(paceline.TensorBoardLog(writer))
        paceline.log(loss=2.0)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(1, 2.0)]
