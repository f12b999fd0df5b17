"""What a starter and the far ends tell each other: lines of JSON, on the stdin and stdout that ssh carries.

A far end says `Hello`, is given a `Part`, says `Meeting` if it is the one that serves the meeting, and in the end
`Bye`. All else on its stdout is what its workers print. The launcher begins each of their lines with a rank, so that
none of them is taken for a message.
"""

from __future__ import annotations

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted

MARK = b"PACELINE-FAR-END "


class LauncherReady(msgspec.Struct, frozen=True, tag=True):
    """The far end runs, with this version of Paceline and this interpreter."""

    version: str
    python: str


class RendezvousAddress(msgspec.Struct, frozen=True, tag=True):
    """The machines meet here."""

    host: str
    port: int


class LauncherExited(msgspec.Struct, frozen=True, tag=True):
    """The launcher has ended with this exit code."""

    code: int


class NodeAssignment(msgspec.Struct, frozen=True, tag=True):
    """What a far end is to run.

    Attributes:
        words: the command line, with the flags that say on which machines; what follows takes precedence over it.
        directory: the one to run in.
        environment: variables that the user's own environment has, and those of the far end need not have.
        secret: the job's, in hexadecimal digits; None for the security level `none`.
        node_rank, nodes: this machine's number, and how many there are.
        workers: how many run here; None if the command line says so.
        run_id: the job's name.
        shutdown_s: how long workers have to end after they were asked to.
        meeting: where the machines meet; None if that is for this machine to say.
        towards: the name of another machine, which an address of this one should reach.
        passes_local_rank: whether the workers are given --local_rank.
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
    """The starter got this signal, by its name."""

    name: str


FromLauncher = LauncherReady | RendezvousAddress | LauncherExited
ToLauncher = NodeAssignment | Signal

_said: msgspec.json.Decoder[FromLauncher] = msgspec.json.Decoder(FromLauncher)
_told: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)


def encode_from_launcher(message: FromLauncher) -> bytes:
    """Returns what a far end writes: it begins a line of its own, whatever has been printed before."""
    return b"\n" + MARK + msgspec.json.encode(message) + b"\n"


def encode_to_launcher(message: ToLauncher) -> bytes:
    """Returns what a starter writes."""
    return msgspec.json.encode(message) + b"\n"


def decode_to_launcher(line: bytes) -> ToLauncher:
    """Reads what a starter wrote.

    Raises:
        ValueError: it is no message.
    """
    try:
        return decode_untrusted(_told.decode, line)
    except ValueError as error:
        raise ValueError(f"not a message of a starter: {error}") from error


def decode_from_launcher(line: bytes) -> FromLauncher:
    """Reads what a far end wrote after `MARK`.

    Raises:
        ValueError: it is no message.
    """
    try:
        return decode_untrusted(_said.decode, line)
    except ValueError as error:
        raise ValueError(f"not a message of a far end: {error}") from error


class MessageSplitter:
    """Separates what a far end says from what is printed there."""

    def __init__(self) -> None:
        self._held = b""  # the beginning of a line that may become a message
        self._in_a_line = False

    def feed(self, data: bytes) -> tuple[list[FromLauncher], bytes]:
        """Takes more of the stream, cut anywhere; returns the messages and the rest.

        Raises:
            ValueError: a message cannot be read.
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
        """Returns what is left of the last line."""
        left, self._held = self._held, b""
        return left
