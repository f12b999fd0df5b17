"""The startup of a worker."""

from __future__ import annotations

import signal
from pathlib import Path

from paceline.operate.diagnosis import worker_process
from paceline.operate.launch.workers import bootstrap


def test_the_bootstrap_answers_the_signal_that_is_sent():
    source = Path(bootstrap.__file__).read_text()
    assert f'_new_file(f"{worker_process.FILE}-{{os.getpid()}}")' in source
    assert "faulthandler.register(signal.SIGRTMAX - 7" in source
    assert worker_process.SIGNAL == signal.SIGRTMAX - 7
