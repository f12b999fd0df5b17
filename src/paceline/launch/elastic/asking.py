"""Connections to other launchers of an elastic job, and words for what came of asking for them."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.elastic.election import Answer
from paceline.elastic.knowledge import Knowledge
from paceline.errors import AuthenticationError
from paceline.launch.nodes.wire import connect
from paceline.security.encryption import Connection
from paceline.security.handshake import HandshakeUnfinishedError

_WORDS = {
    Answer.ENDED: "nobody listens there",
    Answer.SILENT: "no answer",
    Answer.SEEKING: "it looks for one too",
    Answer.ELSEWHERE: "it follows another",
    Answer.FOLLOWED: "too few workers can be reached from there",
}


class UnreachableError(Exception):
    """Another launcher cannot be reached; `answer` says what that shows of it."""

    def __init__(self, why: str, answer: Answer) -> None:
        super().__init__(why)
        self.answer = answer


def reach(address: str, secret: bytes | None, timeout_s: float) -> Connection:
    """Returns a connection to the launcher that listens at an address, such as `node1:29500`.

    Raises:
        UnreachableError: there is none.
    """
    host, _, port = address.rpartition(":")
    try:
        return connect((host.strip("[]"), int(port)), secret, timeout_s)
    except ConnectionRefusedError as error:
        raise UnreachableError(str(error), Answer.ENDED) from error
    except (OSError, ValueError, HandshakeUnfinishedError, AuthenticationError) as error:
        raise UnreachableError(str(error), Answer.SILENT) from error


def addresses_of(known: Knowledge) -> dict[int, str]:
    """Returns where the launchers listen that may live, by machine."""
    return {each.number: each.address for each in known.peers if each.number not in known.ended}


def attempts(known: Knowledge, answers: Mapping[int, Answer]) -> str:
    """Returns what came of asking the others, for the user."""
    hosts = {each.number: each.host for each in known.peers}
    said = sorted(answers.items())
    return ", ".join(f"machine {number} on {hosts.get(number, '?')}: {_WORDS[answer]}" for number, answer in said)
