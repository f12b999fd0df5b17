"""The recording of the process that runs a test."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.comm.record.recorder import directory_of_files
from paceline.operate.diagnosis.recording import ProcessRecording
from paceline.operate.diagnosis.recording_reader import read


def mine() -> ProcessRecording:
    """Returns this process's recording so far."""
    (path,) = Path(directory_of_files()).glob(f"*-{os.getpid()}.record")
    return read(path)
