"""A process that records steps, calls and events when the test asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from paceline.comm.record.layout import NBYTES
from paceline.comm.record.recorder import HANDED_VARIABLE, HandedMemory

WRITER = """
import sys, time
import paceline._core as core
from paceline.comm.record.recorder import begin, identify
from paceline.comm.record.layout import EventKind as K
from paceline.comm.record.spans import begin_event
from paceline.comm.record.log import log

begin(); identify(1, 4)

def step(number):
    core.record_step(number)
    whole = begin_event(K.STEP, "ddp", number)
    for kind in (K.FORWARD, K.BACKWARD):
        part = begin_event(kind)
        if kind == K.BACKWARD:
            time.sleep(0.01)
            bucket = begin_event(K.BUCKET, "ddp", 0, 4096)
            core.record_sent(bucket)
        time.sleep(0.01)
        if kind == K.BACKWARD:
            core.record_end(bucket)
        core.record_end(part)
    log(loss=1.0 / number, samples=32, **({"total_steps": 50} if number == 1 else {}))
    core.record_end(whole)

for line in sys.stdin:
    command, _, number = line.partition(" ")
    exec(line)
    print("done", flush=True)
"""


class Writer:
    """A process that records events as instructed."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("recording")
        os.ftruncate(self.fd, NBYTES)
        handed = HandedMemory(self.fd, os.fstat(self.fd).st_ino, os.getpid())
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, HANDED_VARIABLE: str(handed)},
        )  # fmt: skip

    def do(self, line: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.fd)


@pytest.fixture
def writer():
    writer = Writer()
    writer.do("pass")
    yield writer
    writer.close()
