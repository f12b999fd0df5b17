"""What every rank publishes about itself when the default group forms, and how the others read it.

All ranks must run the same version of Paceline. Only the key "version" has the same meaning in all versions, so it is
read before anything else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline import __version__
from paceline.engine.failures import Member
from paceline.engine.processes import Process
from paceline.errors import RendezvousError
from paceline.security.received import decoded
from paceline.wording import and_more

_FIRST_TO_SAY = "0.1.0"
_MOST_NAMED = 4


def host_id() -> str:
    """Returns a text that is equal in two processes if, and only if, they reach each other's abstract Unix sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def introduce(**more: str | int | None) -> str:
    """Returns this rank's introduction as JSON; `more` holds what an engine needs to know about the rank besides."""
    me = Process.mine()
    process = {"host": socket.gethostname(), "pid": me.pid, "namespace": me.namespace, "started": me.started}
    return msgspec.json.encode({"version": __version__, **process, **more}).decode()


def read(answers: Sequence[bytes], rank: int) -> tuple[tuple[Member, ...], list[dict[str, str | int | None]]]:
    """Returns the ranks, and everything that each of them published.

    Args:
        answers: the introductions, by rank.
        rank: the rank of this process.

    Raises:
        RendezvousError: the ranks run different versions; the message names them.
    """
    entries = [_parsed(answer) for answer in answers]
    _require_same_version(entries, rank)
    members = tuple(
        Member(r, entry["host"], entry["pid"], Process(entry["namespace"], entry["pid"], entry["started"]))
        for r, entry in enumerate(entries)
    )
    return members, entries


def _parsed(answer: bytes) -> dict[str, Any]:
    """Returns an introduction, as far as it can be understood."""
    try:
        said = decoded(msgspec.json.decode, answer)
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {}


def _require_same_version(entries: Sequence[Mapping[str, Any]], rank: int) -> None:
    ranks_of: dict[str, list[int]] = {}
    for r, entry in enumerate(entries):
        ranks_of.setdefault(str(entry.get("version", f"a version before {_FIRST_TO_SAY}")), []).append(r)
    if len(ranks_of) > 1:
        told = "; ".join(
            f"{version} on {and_more([_name(entries[r], r) for r in ranks], _MOST_NAMED)}"
            for version, ranks in ranks_of.items()
        )
        me = Member(rank, socket.gethostname(), os.getpid())
        raise RendezvousError(
            f"{me}: the ranks run different versions of Paceline: {told}. Install the same version for all ranks"
        )


def _name(entry: Mapping[str, Any], rank: int) -> str:
    return str(Member(rank, str(entry["host"]), int(entry["pid"]))) if {"host", "pid"} <= {*entry} else f"rank {rank}"
