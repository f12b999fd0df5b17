"""What a worker leaves behind when it fails, and which of several failures came first."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

# Errors that another rank's failure brings about.
_CONSEQUENCES = {"PeerLostError", "CollectiveTimeoutError", "StoreConnectionError"}
_OWN_FILES = ("paceline/launch/bootstrap.py", "<frozen runpy>", "runpy.py")


@dataclass(frozen=True)
class Record:
    """An exception that ended a worker."""

    time_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class Failure:
    """A worker that did not end well; `exit_code` as of subprocess, negative for a signal."""

    rank: int
    pid: int
    exit_code: int
    seen_s: float
    record: Record | None

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's failure explains this one."""
        return self.record is not None and self.record.kind in _CONSEQUENCES


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The one that explains the others."""
    return min(failures, key=lambda each: (each.is_consequence, each.record.time_s if each.record else each.seen_s))


def describe(failure: Failure) -> str:
    """The failure in one line, and its traceback if it left one."""
    code = failure.exit_code
    how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    line = f"rank {failure.rank} failed first ({socket.gethostname()}, pid {failure.pid}, {how})"
    if failure.record is not None:
        return f"{line}:\n{failure.record.text.rstrip()}"
    if code == -signal.SIGKILL:
        return f"{line}; if nobody killed it by hand, the machine ran out of memory (see dmesg)"
    return f"{line}; it left no Python traceback, look at its output above"


def shell_code(exit_code: int) -> int:
    """The exit code as a shell tells it: 128 + n for signal n."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def write_record(path: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Leaves an exception in the file `path`."""
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(_OWN_FILES):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace))
    draft = f"{path}.{os.getpid()}"
    Path(draft).write_text(json.dumps({"time_s": time.time(), "kind": kind.__name__, "text": text}))
    os.replace(draft, path)


def read_record(path: str) -> Record | None:
    """What `write_record` left, if anything."""
    try:
        return Record(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def record_uncaught(path: str) -> None:
    """Has an uncaught exception of this process recorded in `path`, and printed without the launcher's own frames."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return  # the launcher says that it was interrupted; a traceback a rank adds nothing
        write_record(path, kind, error, trace)
        while trace is not None and trace.tb_frame.f_code.co_filename.endswith(_OWN_FILES):
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)

    sys.excepthook = hook
