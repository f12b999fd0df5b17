"""A program that runs in a separate process, where its calls are recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from paceline.operate.diagnosis.recording import ProcessRecording
from paceline.operate.diagnosis.recording_reader import read

CALLS = """
import paceline, os, signal
from paceline import _core
from paceline.comm.record import recorder
recorder.begin()
recorder.identify(3, 8)
group = recorder.open_group("mine", "test", 7, 1, [2, 3])
def call(operation, sequence):
    return _core.RecordedCall(group, operation, 11, 0, sequence, 1000, -1, False, -1)
done = call(1, 1)
done.start()
done.end(0)
failed = call(2, 2)
failed.end(2)
running = call(9, 3)
running.start()
"""


def run(code: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PACELINE_RECORD_DIR": str(directory), **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def recorded(code: str, directory: Path, **variables: str) -> ProcessRecording:
    done = run(code, directory, **variables)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    (path,) = directory.iterdir()
    return read(path)
