"""Worker failures: their records on disk, their order, and their descriptions for the user.

A worker announces an uncaught exception through a named pipe next to the workers' error files, because the process may
take seconds to exit. The pipe is named, so workers do not have to inherit a descriptor. Each worker writes its own
error file before it writes to the pipe, so the error files identify the sender.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from paceline.comm.security.untrusted_peers import Int64
from paceline.errors import STARTERS, is_user_file
from paceline.operate.launch.workers.placement import format_cpulist

TORCH_SUFFIX = ".torch"  # added to the path of a worker's error file to get the path of the file in torchrun's format
_PIPE_NAME = "alarm"
# Errors caused by another rank's failure: Paceline's own errors, and the errors that gloo, NCCL and sockets raise for a
# lost peer.
_CONSEQUENCES = {
    "PeerLostError",
    "CollectiveTimeoutError",
    "GroupAbortedError",
    "StoreConnectionError",
    "ConnectionResetError",
}
_BY_ITSELF = re.compile(r"GroupAbortedError: .*\bthis process aborted|GroupAbortedError: .*\baborted by this process")
_CONSEQUENCE_TEXTS = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|ncclRemoteError|ncclSystemError|Socket Timeout|"
    r"NCCL communicator was aborted|[Ww]atchdog|recvValue failed|failed to recv, got 0 bytes|Timed out waiting .* recv|"
    r"CollectiveObjectError: .* could not send its object; see the error on that rank",
)
# torch's autograd and pybind11 raise a RuntimeError whose message contains the text of Paceline's error.
_WRAPPED = re.compile(r"\b(PeerLostError|CollectiveTimeoutError|GroupAbortedError|CollectiveMismatchError): rank ")
_MISMATCH = "CollectiveMismatchError"
_DEPARTURE = " left the group (its script ended, or it destroyed the process group)"  # see `comm/engine/failures.py`
_STACKS = re.compile(r"\n\s*(?:At:\n|Exception raised from )")  # stacks that pybind11 and PyTorch append to a message
# A connection broken by a child process, such as a DataLoader worker.
_OF_CONNECTIONS = ("ConnectionResetError", "BrokenPipeError", "EOFError")
_OF_CHILDREN = re.compile(r'^ *File ".*/(?:torch/utils/data|multiprocessing)/', re.MULTILINE)
_DURING = "\nDuring handling of the above exception, another exception occurred:\n"
_GROUP_PREFIX = " |"  # the characters before each line of an exception group
_SECOND_MEMBER = re.compile(r"^ +\+-+ 2 -+$", re.MULTILINE)
_LONGEST_TEXT = 1 << 16
_CRASHED = "Fatal Python error: "
_CRASH_FRAME = re.compile(r'^ +File "(.+)", line (\d+) in ', re.MULTILINE)
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
_MOST_SENT = 256  # the maximum number of failures in a message
_TAIL_CHARACTERS = 1000  # the maximum length of the text of each failure other than the cause
_LONGEST_SUMMARY = 200
_FRAME = re.compile(rf'^[{_GROUP_PREFIX}]*File "(.+)", line (\d+), in ', re.MULTILINE)
_MEMBER = re.compile(r"^ {4,}\| ([A-Za-z_][\w.]*(?::.*)?)$", re.MULTILINE)  # an exception in an exception group
_OWN_FILES = (*STARTERS, "paceline/operate/plan/measure_worker.py", "<frozen runpy>")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exception that terminated a worker."""

    time_s: float
    kind: str
    text: str


class WorkerFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's failure. `exit_code` is negative if a signal terminated the worker, as in `subprocess`."""

    rank: Int64
    pid: Int64
    exit_code: Int64
    seen_s: float
    record: Record | None
    host: str = msgspec.field(default_factory=socket.gethostname)
    memory: str | None = None  # memory statistics, if the out-of-memory killer killed the worker
    log: str | None = None  # directory with the worker's output
    at_exit: bool = False  # whether the script had finished and the interpreter was shutting down
    exit_line: str = ""  # the line of the user's code that called `sys.exit(3)`, for example, or that crashed
    exit_message: str = ""  # the message with which it exited, as in `sys.exit("no data")`

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's failure explains this one."""
        return self.record is not None and _is_consequence(self.record)

    @property
    def is_mismatch(self) -> bool:
        """Whether the ranks' calls did not match. All ranks then raise the same error."""
        return self.record is not None and _known_kind(self.record.kind, self.record.text) == _MISMATCH

    @property
    def follows_departure(self) -> bool:
        """Whether another rank caused this failure by leaving the group, possibly without exiting."""
        return self.is_consequence and self.record is not None and _DEPARTURE in self.record.text

    @property
    def is_interrupt(self) -> bool:
        """Whether an unhandled Ctrl-C terminated the worker."""
        kind = self.record.kind if self.record is not None else None
        return kind == "KeyboardInterrupt" or self.exit_code in (-signal.SIGINT, 128 + signal.SIGINT)

    @property
    def how(self) -> str:
        """A short description of the worker's exit."""
        if self.memory is not None:
            return "killed by the kernel, out of memory"
        return f"exit code {self.exit_code}" if self.exit_code >= 0 else f"killed by {signal_name(-self.exit_code)}"

    @property
    def manner(self) -> str:
        """The kind of failure, as the name of a member of `diagnosis.job_snapshot.ExitReason`."""
        if self.memory is not None:
            return "OUT_OF_MEMORY"
        if self.record is None:
            return "KILLED" if self.exit_code < 0 else "EXITED"
        if self.is_mismatch:
            return "MISMATCH"
        return "CONSEQUENCE" if self.is_consequence else "EXCEPTION"

    @property
    def summary(self) -> str:
        """The exception's message, shortened to one line, or `how` if there is no exception."""
        if self.record is None:
            return f"{self.how}: {self.exit_message}" if self.exit_message else self.how
        is_of_child = self.record.kind in _OF_CONNECTIONS and _OF_CHILDREN.search(self.record.text)
        hint = " (a child process, such as a DataLoader worker, has exited; see its output)" if is_of_child else ""
        text = _summarized(in_one_line(self.record))
        return f"{text if text.endswith('...') else text.rstrip('.')}{hint}"

    @property
    def line(self) -> str:
        """The line in the user's own code that raised the exception or exited, such as `train.py:71`, or ""."""
        return self.exit_line if self.record is None else _last_user_line(self.record.text)

    @property
    def handled(self) -> str:
        """The exception that was being handled when this one was raised, with its line; "" if there is none."""
        text = "" if self.record is None else self.record.text
        before, during, _ = text.partition(_DURING)
        after_frames = re.split(r"^ .*\n", before, flags=re.MULTILINE)[-1] if during else ""
        exception, line = _summarized(after_frames.partition("\n")[0]), _last_user_line(before)
        return f"{exception} ({line})" if exception and line else exception


def _summarized(text: str) -> str:
    """Shortens a long text to its first sentences, or to whole words if the first sentence is too long."""
    if len(text) <= _LONGEST_SUMMARY:
        return text
    start = text[:_LONGEST_SUMMARY]
    sentences, found, _ = start.rpartition(". ")
    return sentences if found else start.rpartition(" ")[0] + " ..."


def crash_line(output: bytes) -> str:
    """Returns the user's line, such as `train.py:71`, in the stack of a crash at the end of the output; "" if none."""
    text = output.decode(errors="replace").replace("\r", "").rpartition(_CRASHED)[2]
    stack = text.partition("Current thread ")[2].partition("\n\n")[0]
    own = [(file, number) for file, number in _CRASH_FRAME.findall(stack) if is_user_file(file)]
    return f"{os.path.basename(own[0][0])}:{own[0][1]}" if own else ""


def _last_user_line(text: str) -> str:
    text = _SECOND_MEMBER.split(text, maxsplit=1)[0]
    own = [(file, number) for file, number in _FRAME.findall(text) if is_user_file(file)]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def _is_consequence(record: Record) -> bool:
    if record.kind in _OF_CONNECTIONS and _OF_CHILDREN.search(record.text):
        return False
    line = in_one_line(record)
    is_ours = _known_kind(record.kind, record.text) in _CONSEQUENCES and not _BY_ITSELF.search(line)
    return is_ours or bool(_CONSEQUENCE_TEXTS.search(line))


def _known_kind(kind: str, text: str) -> str:
    """Returns an exception's class or, if its message quotes one of Paceline's errors, the class of that error."""
    wrapped = _WRAPPED.search(_exception_in(kind, text))
    return kind if wrapped is None else wrapped[1]


def in_one_line(record: Record) -> str:
    """Returns the exception at the end of a traceback as one line, without the stacks that libraries append to it.

    If the message contains another process's traceback, only the exception of this process is returned.
    """
    text = _STACKS.split(_exception_in(record.kind, record.text), maxsplit=1)[0]
    lines = text.rstrip().splitlines()
    if lines and lines[0].startswith(tuple(_GROUP_PREFIX)):
        member = _MEMBER.search(text)
        return lines[0].strip(_GROUP_PREFIX) + (f", first {member[1]}" if member else "")
    if "Traceback (most recent call last)" in text:
        return lines[-1]
    return " ".join(line.strip() for line in lines if line.strip())


def _exception_in(kind: str, text: str) -> str:
    """Returns the end of a traceback, from the line that begins with the exception's class."""
    found = list(re.finditer(rf"^[{_GROUP_PREFIX}]*(?:[\w.<>]+\.)?{re.escape(kind)}(?=:|$)", text, re.MULTILINE))
    return text[found[-1].start() :] if found else _last_line(text)


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as `SIGSEGV` for 11, or "signal N" for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_signal(name: str, workers: int, timeout_s: float) -> str:
    """Describes the launcher's reaction to a signal that it passes on to its workers."""
    to = "1 worker, which has" if workers == 1 else f"{workers} workers, which have"
    whom = "the worker" if workers == 1 else "them"
    return f"{name}: passed on to {to} {timeout_s:g} s to exit (send it again to kill {whom})"


def first_failure(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """Returns the failure that most likely caused the other failures."""
    return min(
        failures,
        key=lambda failure: (
            failure.is_consequence,
            failure.record.time_s if failure.record else failure.seen_s,
        ),
    )


def shortened(failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
    """Limits failures to what fits in a message: the cause, and other failures with truncated texts."""
    cause = first_failure(failures) if failures else None
    kept: list[WorkerFailure] = []
    for failure in failures:
        if failure is cause:
            kept.append(failure)
        elif len(kept) < _MOST_SENT:
            record = failure.record and msgspec.structs.replace(failure.record, text=_tail(failure.record))
            kept.append(msgspec.structs.replace(failure, record=record))
    return tuple(kept)


def _tail(record: Record) -> str:
    """Returns the end of a traceback or, if the exception's own text would not fit, the beginning of this text."""
    exception = _exception_in(record.kind, record.text)
    is_long = len(exception) > _TAIL_CHARACTERS
    return exception[:_TAIL_CHARACTERS] if is_long else record.text[-_TAIL_CHARACTERS:]


def describe(failure: WorkerFailure, word: str = "rank", printed_by: int | None = None) -> str:
    """Describes the failure in one line, followed by its traceback if there is one.

    If the user can still see this or a similar traceback, printed by worker `printed_by`, only the last line of the
    traceback is included.
    """
    code = failure.exit_code
    log = f"; its output is in {failure.log}" if failure.log else ""
    look = "look at its output" if failure.log else "look at its output above"  # it may be only in files
    # If another rank caused all failures, that rank did not fail itself, but left early or was lost. If calls do not
    # match, all ranks raise the same error, and the first of them need not be at fault.
    failed = f"failed because of another {word}" if failure.is_consequence else "failed first"
    if failure.is_mismatch:
        failed = f"failed because the {word}s' calls do not match"
    line = f"{word} {failure.rank} {failed} ({failure.host}, pid {failure.pid}, {failure.how})"
    if failure.record is not None and printed_by is not None:
        where = "its traceback is above" if printed_by == failure.rank else f"see {word} {printed_by}'s traceback above"
        return f"{line}: {failure.summary}; {where}{log}"
    if failure.record is not None:
        return f"{line}{log}:\n{failure.record.text.rstrip()}"
    if failure.memory is not None:
        return f"{line}: {failure.memory}{log}"
    if failure.at_exit and code in _CRASHES:
        return (
            f"{line} after its script had ended, while Python was shutting down; threads that native libraries leave "
            "running can cause this. If it uses torch.distributed, call destroy_process_group() at the end of the "
            f"script; {look}{log}"
        )
    if code == -signal.SIGKILL:
        return f"{line}; if it was not killed manually, the machine ran out of memory (see dmesg){log}"
    if code in _CRASHES:
        where = f" at {failure.exit_line}" if failure.exit_line else ""
        return f"{line}{where}; {look}, where Python has printed the stack of the crash{log}"
    if failure.exit_message:
        line += f": {failure.exit_message}"
    if failure.exit_line:
        return f"{line}; it called sys.exit or raised SystemExit at {failure.exit_line}; {look}{log}"
    return f"{line}; it left no Python traceback; {look}{log}"


def report_parts(
    failures: Sequence[WorkerFailure],
    ranks: Sequence[int] = (),
    word: str = "rank",
    is_in_view: Callable[[str, str], bool] = lambda _text, _name: False,
) -> list[str]:
    """Returns the description of the cause, a line for each other failure, and a line for the ranks that did not fail.

    If there is only one failure, it is the last part, because users look at the end first. If there are several, the
    cause is the first part.

    Args:
        failures: At least one failure.
        ranks: All ranks in the job.
        word: The noun for the workers' numbers.
        is_in_view: A function that returns whether the user can still see a text printed by a worker, given a name such
            as "rank 0". Visible texts are not repeated.
    """
    cause = first_failure(failures)
    likewise = [failure for failure in failures if failure is not cause and _are_alike(failure, cause)]
    # The first rank to fail is not always the first to print.
    printed_by = next((failure.rank for failure in (cause, *likewise) if _is_printed(failure, word, is_in_view)), None)
    if len(likewise) == 1:
        likewise = []  # a single rank is listed, because a summary would not be shorter
    others = []
    for failure in sorted(failures, key=lambda failure: failure.rank):
        if failure is not cause and failure not in likewise:
            what = failure.how
            if failure.record is not None:
                what = _summarized(in_one_line(failure.record).partition(". ")[0])
            label = "a consequence" if failure.is_consequence else "failed too"
            others.append(f"{word} {failure.rank} ({failure.host}, pid {failure.pid}), {label}: {what}")
    failed = {failure.rank for failure in failures}
    ended = [rank for rank in ranks if rank not in failed]
    if likewise:
        numbers = format_cpulist({failure.rank for failure in likewise}).replace(",", ", ")
        others.append(f"{word}s {numbers} failed in the same way")
    numbers = format_cpulist(set(ended)).replace(",", ", ")
    unhurt = [f"{word}{'s' if len(ended) > 1 else ''} {numbers} did not fail"] if ended else []
    failed_first = describe(cause, word, printed_by)
    return [failed_first, *others, *unhurt] if others else [*unhurt, failed_first]


def _is_printed(failure: WorkerFailure, word: str, is_in_view: Callable[[str, str], bool]) -> bool:
    if failure.record is None:
        return False
    # For an error caused by another rank, only the user's frames are printed (`print_uncaught`).
    text = _last_line(failure.record.text) if failure.is_consequence else failure.record.text
    return is_in_view(text, f"{word} {failure.rank}")


def _are_alike(one: WorkerFailure, other: WorkerFailure) -> bool:
    """Returns True if two workers failed with the same exception at the same location, ignoring numbers.

    Errors about mismatched calls are always alike, although each rank raises the error in its own call.
    """
    if one.record is None or other.record is None:
        return False
    if one.is_mismatch and other.is_mismatch:
        return True
    texts = [_without_numbers(_tail(record)) for record in (one.record, other.record)]
    return texts[0] == texts[1]


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def write_error_json(failure: WorkerFailure) -> None:
    """Writes a failure to `error.json` next to the worker's output, if output is kept in files."""
    if failure.log is not None:
        with contextlib.suppress(OSError):  # e.g. the disk is full; the console also shows the failure
            Path(failure.log).mkdir(parents=True, exist_ok=True)
            more = {"how": failure.how, "manner": failure.manner, "line": failure.line}
            more |= {"summary": failure.summary, "handled": failure.handled}
            Path(failure.log, "error.json").write_text(json.dumps({**msgspec.to_builtins(failure), **more}, indent=1))


def write_record(path: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Writes an exception record to the file `path`."""
    text = "".join(traceback.format_exception(kind, error, _without_own(trace)))
    if len(text) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters, see the rank's output ...\n{text[-half:]}"
    draft = f"{path}.{os.getpid()}"
    Path(draft).write_text(json.dumps({"time_s": time.time(), "kind": kind.__name__, "text": text}))
    os.replace(draft, path)


def read_record(path: str) -> Record | None:
    """Reads the record written by `write_record`, or by torch's `record_exception`; returns None if there is none."""
    try:
        return Record(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError):
        return _read_torch_record(f"{path}{TORCH_SUFFIX}")


def _read_torch_record(path: str) -> Record | None:
    """Reads an error file in torchrun's format, which a program can write before it exits without an exception."""
    try:
        file = Path(path)
        message = json.loads(file.read_text()[: 4 * _LONGEST_TEXT])["message"]
        if isinstance(message, str):
            summary, stack = message, ""
        else:
            summary, stack = str(message["message"]), str(message.get("extraInfo", {}).get("py_callstack", ""))
        has_stack = stack.rstrip().endswith(summary.rstrip())
        text = stack if has_stack else "\n".join(filter(None, (stack.rstrip(), summary)))
        return Record(file.stat().st_mtime, summary.partition(":")[0], text[-_LONGEST_TEXT:])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_exit(path: str, error: SystemExit) -> None:
    """Saves the user's line that raised a SystemExit, and its message, in a file next to the error file `path`."""
    line = _last_user_line("".join(traceback.format_tb(_without_own(error.__traceback__))))
    message = "" if error.code is None or isinstance(error.code, int) else " ".join(str(error.code).split())
    if line or message:
        Path(f"{path}.exit").write_text(f"{line}\n{_summarized(message)}", errors="backslashreplace")


def read_exit(path: str) -> tuple[str, str]:
    """Returns the line and the message written by `write_exit`; both are "" by default."""
    try:
        line, _, message = Path(f"{path}.exit").read_text(errors="replace").partition("\n")
        return line, message
    except OSError:
        return "", ""


def write_thread_error(path: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Saves the first exception that ended a thread, and its line, in a file next to the error file `path`."""
    text = "".join(traceback.format_exception(kind, error, trace))
    exception, line = _summarized(in_one_line(Record(0.0, kind.__name__, text))), _last_user_line(text)
    with contextlib.suppress(OSError), open(f"{path}.thread", "x", errors="backslashreplace") as file:
        file.write(f"{exception} ({line})" if line else exception)


def record_uncaught(path: str, error: BaseException) -> None:
    """Records an uncaught exception in the file `path` and announces it to the launcher."""
    with contextlib.suppress(OSError):  # e.g. the disk is full; the exception is printed in any case
        write_record(path, type(error), error, error.__traceback__)
        notify_exception(os.path.dirname(path))


def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an exception without the launcher's own frames.

    If another rank caused the exception, only the user's own frames are printed, to keep the cause visible. The
    launcher prints the full traceback if this rank turns out to be the cause. An exception that another rank on this
    machine has already printed is not repeated; the launcher lists the ranks with the same failure.
    """
    if issubclass(kind, KeyboardInterrupt):
        return  # the launcher reports the interrupt; tracebacks from each rank would not add information
    shown = traceback.TracebackException(kind, error, _without_own(trace))
    text = "".join(shown.format())
    if _is_consequence(Record(0.0, kind.__name__, text)):
        ours = [frame for frame in shown.stack if is_user_file(frame.filename)]
        shown.stack = traceback.StackSummary.from_list(ours)
        shown.__cause__ = shown.__context__ = None
        text = "".join(shown.format()).replace("Traceback (", "Another rank's failure caused this (", 1)
    elif not _is_first_to_print(text):
        return
    sys.stderr.write(text)


def _is_first_to_print(text: str) -> bool:
    """Returns True if this is the first rank on this machine and in this generation to print such an exception."""
    import hashlib

    path = os.environ.get("PACELINE_ERROR_FILE", "")
    # elastic jobs have no generations, and the same exception may occur again later
    if not path or "PACELINE_ELASTIC_FD" in os.environ:
        return True
    digest = hashlib.sha256(_without_numbers(text).encode(errors="replace")).hexdigest()[:16]
    try:
        os.close(os.open(f"{path.rpartition('-')[0]}-like-{digest}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:  # e.g. the disk is full
        pass
    return True


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(_OWN_FILES):
        trace = trace.tb_next
    return trace


class ExceptionNotice:
    """The launcher's end of the named pipe in the directory with the error files.

    If the pipe cannot be created, exceptions are detected only when the workers exit.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, _PIPE_NAME)
        self._fd = -1
        with contextlib.suppress(OSError):
            os.mkfifo(self._path, 0o600)
            # Opened for reading and writing, because a read-only pipe reports end of file whenever a writer closes it.
            self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int | None:
        """Returns a descriptor that is readable after an announcement, or None if there is no pipe."""
        return self._fd if self._fd >= 0 else None

    def clear(self) -> None:
        """Discards pending announcements."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 4096)

    def close(self) -> None:
        """Removes the pipe; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def notify_exception(directory: str) -> None:
    """Announces an exception to the launcher that reads from the pipe in `directory`, if there is one."""
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(directory, _PIPE_NAME), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, b".")
        finally:
            os.close(fd)
