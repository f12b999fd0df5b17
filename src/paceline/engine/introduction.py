"""What every rank publishes about itself when the default group forms, and how the others read it.

All ranks must run the same version of Paceline. Only the key "version" has the same meaning in all versions, so it is
read before anything else.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline import __version__
from paceline.engine.failures import Member
from paceline.engine.processes import Process
from paceline.errors import RendezvousError
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
    return json.dumps({"version": __version__, **process, **more})


def read(answers: Sequence[bytes], rank: int) -> tuple[tuple[Member, ...], list[dict[str, str | int | None]]]:
    """Returns the ranks, and everything that each of them published.

    Args:
        answers: the introductions, by rank.
        rank: the rank of this process.

    Raises:
        RendezvousError: the ranks run different versions; the message names them.
    """
    _require_same_version(answers, rank)
    entries = [json.loads(answer) for answer in answers]
    members = tuple(
        Member(r, entry["host"], entry["pid"], Process(entry["namespace"], entry["pid"], entry["started"]))
        for r, entry in enumerate(entries)
    )
    return members, entries


def _require_same_version(answers: Sequence[bytes], rank: int) -> None:
    ranks_of: dict[str, list[str]] = {}
    for r, answer in enumerate(answers):
        version, name = _version(answer, r)
        ranks_of.setdefault(version, []).append(name)
    if len(ranks_of) > 1:
        told = "; ".join(f"{version} on {and_more(names, _MOST_NAMED)}" for version, names in ranks_of.items())
        me = Member(rank, socket.gethostname(), os.getpid())
        raise RendezvousError(
            f"{me}: the ranks run different versions of Paceline: {told}. Install the same version for all ranks"
        )


def _version(answer: bytes, rank: int) -> tuple[str, str]:
    """Returns a rank's version and name, as far as its introduction can be understood."""
    try:
        said = json.loads(answer)
    except ValueError:
        said = None
    entry: Mapping[str, object] = said if isinstance(said, dict) else {}
    name = (
        str(Member(rank, str(entry["host"]), int(str(entry["pid"])))) if {"host", "pid"} <= {*entry} else f"rank {rank}"
    )
    return str(entry.get("version", f"a version before {_FIRST_TO_SAY}")), name
