"""Ranks in forks of a notebook: whole lines in its cells, and a warning if they cannot use CUDA."""

from __future__ import annotations

import io
import os
import warnings
from types import SimpleNamespace

import pytest

from paceline import linux
from paceline.operate.launch import spawn
from paceline.operate.launch.spawn import WholeLines, notebook_launch


class Pieces(io.StringIO):
    """A stream that records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)


def test_a_line_and_its_end_are_one_piece():
    stream = Pieces()
    lines = WholeLines(stream)
    print("rank", 0, file=lines)
    print("rank", 1, file=lines)
    assert stream.pieces == ["rank 0\n", "rank 1\n"]


def test_several_lines_at_once_are_passed_on_together():
    stream = Pieces()
    lines = WholeLines(stream)
    assert lines.write("one\ntwo\nth") == 10
    assert stream.pieces == ["one\ntwo\n"]
    lines.write("ree\n")
    assert stream.pieces == ["one\ntwo\n", "three\n"]


def test_an_unfinished_line_is_passed_on_when_it_is_flushed():
    stream = Pieces()
    print("10 %", end="", flush=True, file=WholeLines(stream))
    assert stream.pieces == ["10 %"]


def test_a_notebook_whose_forks_cannot_use_cuda_is_warned(monkeypatch):
    """After torch.cuda.is_available(), which initializes the driver, torch does not report CUDA as initialized."""
    started: list[str | None] = []

    def start(*_: object, start_method: str, **__: object) -> SimpleNamespace:
        started.append(start_method)
        return SimpleNamespace(join=lambda: True)

    monkeypatch.setattr(spawn, "spawn", start)
    monkeypatch.setattr(linux, "CUDA_DEVICE", "/dev/full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notebook_launch(os.getpid, 1, start_method="fork")
        with open("/dev/full"):
            notebook_launch(os.getpid, 1, start_method="spawn")
    with open("/dev/full"), pytest.warns(UserWarning, match=r"getpid runs in forks .* PYTORCH_NVML_BASED_CUDA_CHECK=1"):
        notebook_launch(os.getpid, 1, start_method="fork")
    assert started == ["fork", "spawn", "fork"]
