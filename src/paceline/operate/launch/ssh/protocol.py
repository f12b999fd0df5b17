"""Messages between `paceline run --hosts` and the remote launchers: JSON lines on stdin and stdout, over ssh.

A remote launcher sends `LauncherReady`, receives a `NodeAssignment` from the launching process, sends
`RendezvousAddress` if it hosts the rendezvous, and finally sends `LauncherExited`. The rest of its stdout is worker
output. Every line of worker output has a rank prefix and therefore cannot be mistaken for a message.
"""

from __future__ import annotations

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted

MARK = b"PACELINE-FAR-END "


# Earlier versions use the same tag, so the launching process can recognize and report a machine with an earlier
# version.
class LauncherReady(msgspec.Struct, frozen=True, tag="Hello"):
    """A remote launcher is running, with this version of Paceline and this interpreter."""

    version: str
    python: str


class RendezvousAddress(msgspec.Struct, frozen=True, tag=True):
    """The address of the launchers' rendezvous."""

    host: str
    port: int


class LauncherExited(msgspec.Struct, frozen=True, tag=True):
    """The launcher has exited with this exit code."""

    code: int


class NodeAssignment(msgspec.Struct, frozen=True, tag=True):
    """The part of a job that one machine runs. The other attributes take precedence over the flags in `words`."""

    words: list[str]  # complete command line
    directory: str  # working directory
    environment: dict[str, str]  # variables to set, taken from the launching process's environment
    secret: str | None  # in hexadecimal; None with the security level `none`
    node_rank: int
    nodes: int
    workers: int | None  # number of workers on this machine; None to use the number in the command line
    run_id: str
    shutdown_s: float  # time between the shutdown request and SIGKILL
    rendezvous: tuple[str, int] | None = None  # None on the machine that hosts the rendezvous
    toward: str = ""  # name of another machine, from which the rendezvous address must be reachable
    passes_local_rank: bool = False  # whether to pass --local_rank to workers


class Signal(msgspec.Struct, frozen=True, tag=True):
    """The name of a signal that the launching process has received."""

    name: str


FromLauncher = LauncherReady | RendezvousAddress | LauncherExited
ToLauncher = NodeAssignment | Signal

_from_launcher: msgspec.json.Decoder[FromLauncher] = msgspec.json.Decoder(FromLauncher)
_to_launcher: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)


def encode_from_launcher(message: FromLauncher) -> bytes:
    """Encodes a message from a remote launcher. The message starts on a new line, even after unfinished output."""
    return b"\n" + MARK + msgspec.json.encode(message) + b"\n"


def encode_to_launcher(message: ToLauncher) -> bytes:
    """Encodes a message from the launching process."""
    return msgspec.json.encode(message) + b"\n"


def decode_to_launcher(line: bytes) -> ToLauncher:
    """Decodes a message from the launching process; raises ValueError if the line is not one."""
    try:
        return decode_untrusted(_to_launcher.decode, line)
    except ValueError as error:
        raise ValueError(f"not a message from a launching process: {error}") from error


def decode_from_launcher(line: bytes) -> FromLauncher:
    """Decodes the part of a remote launcher's message after `MARK`; raises ValueError if it is not one."""
    try:
        return decode_untrusted(_from_launcher.decode, line)
    except ValueError as error:
        raise ValueError(f"not a message from a remote launcher: {error}") from error


class MessageSplitter:
    """Separates a remote launcher's messages from other output."""

    def __init__(self) -> None:
        self._held = b""  # beginning of a line that may turn out to be a message
        self._in_a_line = False

    def feed(self, data: bytes) -> tuple[list[FromLauncher], bytes]:
        """Processes the next part of the stream, which may be split at any byte; returns messages and other output."""
        messages: list[FromLauncher] = []
        printed = bytearray()
        *lines, last = (self._held + data).split(b"\n")
        self._held = b""
        for line in lines:
            if not self._in_a_line and line.startswith(MARK):
                messages.append(decode_from_launcher(line[len(MARK) :]))
            else:
                printed += line + b"\n"
            self._in_a_line = False
        if not self._in_a_line and (last.startswith(MARK) or MARK.startswith(last)):
            self._held = last
        else:
            printed += last
            self._in_a_line = True
        return messages, bytes(printed)

    def close(self) -> bytes:
        """Returns the unfinished last line."""
        left, self._held = self._held, b""
        return left
