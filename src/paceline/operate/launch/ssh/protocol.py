"""Messages between the starter and the remote launchers: lines of JSON, on the stdin and stdout that ssh carries.

A remote launcher sends `LauncherReady`, receives a `NodeAssignment`, sends `RendezvousAddress` if it serves the
meeting, and finally `LauncherExited`. The rest of its stdout is the output of its workers. The launcher begins each of
their lines with a rank, so that none of them looks like a message.
"""

from __future__ import annotations

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted

MARK = b"PACELINE-FAR-END "


# The tag is that of earlier versions, so that a machine with one of them is reported as such.
class LauncherReady(msgspec.Struct, frozen=True, tag="Hello"):
    """A remote launcher runs, with this version of Paceline and this interpreter."""

    version: str
    python: str


class RendezvousAddress(msgspec.Struct, frozen=True, tag=True):
    """The address of the machines' meeting."""

    host: str
    port: int


class LauncherExited(msgspec.Struct, frozen=True, tag=True):
    """The launcher has ended with this exit code."""

    code: int


class NodeAssignment(msgspec.Struct, frozen=True, tag=True):
    """One machine's part of the job.

    Attributes:
        words: The whole command line; the other attributes take precedence over its flags.
        directory: The working directory.
        environment: Variables of the starter's environment to set.
        secret: The job's secret in hexadecimal digits; None for the security level `none`.
        node_rank: The number of this machine.
        nodes: The number of machines.
        workers: The number of workers of this machine; None to use that of the command line.
        run_id: The job's name.
        shutdown_s: The time from the request to end until SIGKILL, in seconds.
        meeting: The address of the meeting; None on the machine that serves it.
        towards: The name of another machine, which must be able to reach the address that this one serves at.
        passes_local_rank: Whether workers receive --local_rank.
    """

    words: list[str]
    directory: str
    environment: dict[str, str]
    secret: str | None
    node_rank: int
    nodes: int
    workers: int | None
    run_id: str
    shutdown_s: float
    meeting: tuple[str, int] | None = None
    towards: str = ""
    passes_local_rank: bool = False


class Signal(msgspec.Struct, frozen=True, tag=True):
    """A signal that the starter received, by its name."""

    name: str


FromLauncher = LauncherReady | RendezvousAddress | LauncherExited
ToLauncher = NodeAssignment | Signal

_from_launcher: msgspec.json.Decoder[FromLauncher] = msgspec.json.Decoder(FromLauncher)
_to_launcher: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)


def encode_from_launcher(message: FromLauncher) -> bytes:
    """Encodes a message of a remote launcher, which starts a new line even after an unfinished one."""
    return b"\n" + MARK + msgspec.json.encode(message) + b"\n"


def encode_to_launcher(message: ToLauncher) -> bytes:
    """Encodes a message of the starter."""
    return msgspec.json.encode(message) + b"\n"


def decode_to_launcher(line: bytes) -> ToLauncher:
    """Decodes a message of the starter.

    Raises:
        ValueError: the line is not a message.
    """
    try:
        return decode_untrusted(_to_launcher.decode, line)
    except ValueError as error:
        raise ValueError(f"not a message of a starter: {error}") from error


def decode_from_launcher(line: bytes) -> FromLauncher:
    """Decodes the part after `MARK` of a remote launcher's message.

    Raises:
        ValueError: the line is not a message.
    """
    try:
        return decode_untrusted(_from_launcher.decode, line)
    except ValueError as error:
        raise ValueError(f"not a message of a far end: {error}") from error


class MessageSplitter:
    """Separates a remote launcher's messages from its other output."""

    def __init__(self) -> None:
        self._held = b""  # the beginning of a line that may become a message
        self._in_a_line = False

    def feed(self, data: bytes) -> tuple[list[FromLauncher], bytes]:
        """Accepts more of the stream, which may be split anywhere; returns the messages and the other output.

        Raises:
            ValueError: a message cannot be decoded.
        """
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
        """Returns the rest of the last line."""
        left, self._held = self._held, b""
        return left
