"""What every rank says about itself when the default group forms, and who the ranks then are.

All must run the same version of Paceline. What they say may differ between versions in all but the key "version", so
that is read before anything else.
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

_FIRST_TO_SAY = "0.1.0"


def host_id() -> str:
    """Returns a text that processes share if, and only if, they reach each other's abstract Unix sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def introduce(**more: str | int | None) -> str:
    """What this rank says, with `more` that an engine needs to know of it."""
    me = Process.mine()
    process = {"host": socket.gethostname(), "pid": me.pid, "namespace": me.namespace, "started": me.started}
    return json.dumps({"version": __version__, **process, **more})


def read(answers: Sequence[bytes], rank: int) -> tuple[tuple[Member, ...], list[dict[str, str | int | None]]]:
    """The ranks, and all that each of them said.

    Args:
        answers: what the ranks said, by rank.
        rank: this one.

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
        told = "; ".join(f"{version} on {', '.join(names)}" for version, names in ranks_of.items())
        me = Member(rank, socket.gethostname(), os.getpid())
        raise RendezvousError(
            f"{me}: the ranks run different versions of Paceline: {told}. Install the same version for all ranks"
        )


def _version(answer: bytes, rank: int) -> tuple[str, str]:
    """A rank's version and name, as far as what it said can be understood."""
    try:
        said = json.loads(answer)
    except ValueError:
        said = None
    entry: Mapping[str, object] = said if isinstance(said, dict) else {}
    name = (
        str(Member(rank, str(entry["host"]), int(str(entry["pid"])))) if {"host", "pid"} <= {*entry} else f"rank {rank}"
    )
    return str(entry.get("version", f"a version before {_FIRST_TO_SAY}")), name
