"""A worker that sends the usual messages of an elastic job to its launcher, but neither trains nor imports torch.

    elastic_toy.py DIRECTORY

It records its start in DIRECTORY/log and each view in DIRECTORY/views. A file in DIRECTORY is a command: `end` ends all
workers, `failN` makes the worker in slot N fail once it is in a view, and `break` makes starting workers fail.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from paceline.train.elastic import protocol
from paceline.train.elastic.protocol import (
    LEFT_OUT,
    ExitRequest,
    FromWorker,
    LeaveNotice,
    LoopFinished,
    View,
    ViewInstalled,
    WorkerReady,
)


class Toy:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.uid, self.slot = os.environ["PACELINE_WORKER"], os.environ["RANK"]
        self.launcher = socket.socket(fileno=int(os.environ["PACELINE_ELASTIC_FD"]))
        self.launcher.settimeout(0.01)
        self.is_leaving = False
        self.view: View | None = None
        signal.signal(signal.SIGTERM, self.leave)

    def say(self, message: FromWorker) -> None:
        self.launcher.send(protocol.encode_message(message))

    def leave(self, *_: object) -> None:
        self.is_leaving = True
        self.say(LeaveNotice("SIGTERM"))

    def note(self, name: str, *words: object) -> None:
        with open(self.directory / name, "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def is_ordered(self, word: str) -> bool:
        return (self.directory / word).exists()

    def hear(self) -> None:
        try:
            datagram = self.launcher.recv(protocol.LARGEST_DATAGRAM)
        except TimeoutError:
            return
        match protocol.decode_to_worker(datagram):
            case ExitRequest(_, code):
                sys.exit(code)
            case View() as view if self.uid in view.members:
                self.view = view
                self.note("views", self.uid, *view.members)
                self.say(ViewInstalled(view.generation, 0))
            case View() if self.is_leaving:
                sys.exit(0)
            case View() if self.view is not None:
                sys.exit(LEFT_OUT)

    def run(self) -> None:
        (self.directory / f"host-{self.uid}").write_text(os.uname().nodename)
        self.note("log", self.uid, os.getpid(), self.slot, os.environ["WORLD_SIZE"], time.time())
        if self.is_ordered("break"):
            raise ValueError("told to break")
        self.say(WorkerReady("toy"))
        while not (self.view is not None and self.is_ordered("end")):
            self.hear()
            if self.view is not None and self.is_ordered(f"fail{self.slot}"):
                raise ValueError("told to fail")
            if self.view is not None and self.is_ordered(f"babble{self.slot}"):
                os.rename(self.directory / f"babble{self.slot}", self.directory / "babbled")
                self.launcher.send(b"hello")
        self.say(LoopFinished(0))


if __name__ == "__main__":
    Toy(Path(sys.argv[1])).run()
