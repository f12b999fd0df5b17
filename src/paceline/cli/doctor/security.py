"""Says how the connections of jobs are protected here, on which sockets running jobs listen, and who reaches them."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from paceline.cli.doctor.listening import Listener, listeners_of
from paceline.cli.doctor.report import Finding, Level
from paceline.launch.lifeline import marked
from paceline.security.encryption import identity_of
from paceline.security.levels import INSECURE_VARIABLE, VARIABLE, chosen_level, is_insecure, is_loopback
from paceline.security.secret import job_secret

_MEANINGS = {
    None: "not chosen: connections are authenticated, and encrypted where an address is public",
    "auth": "auth: connections are authenticated and not encrypted",
    "encrypt": "encrypt: connections are authenticated, and encrypted between machines",
    "none": "none: connections are neither authenticated nor encrypted",
}


def check_security() -> list[Finding]:
    """Reports the level, the secret, OpenSSL, and the listening sockets of this user's running jobs."""
    return [_level(), _secret(), _openssl(), *_listeners()]


def _level() -> Finding:
    try:
        level = chosen_level()
    except ValueError as error:
        return Finding(Level.BAD, "level", str(error), "jobs do not start", f"correct {VARIABLE}, or unset it")
    if level == "none" and is_insecure():
        why = "every process that reaches a port of the job can join it"
        return Finding(
            Level.BAD, "level", f"{_MEANINGS[level]}, also between machines", why, f"unset {INSECURE_VARIABLE}"
        )
    return Finding(Level.GOOD if level != "none" else Level.NOTE, "level", _MEANINGS[level])


def _secret() -> Finding:
    try:
        secret = job_secret()
    except (ValueError, OSError) as error:
        return Finding(Level.BAD, "secret", str(error), "jobs do not start", "see docs/security.md")
    seen = "none in the environment; `paceline run` makes one for a job of one machine, and with --print-token or Slurm"
    return Finding(Level.GOOD, "secret", seen if secret is None else "from the environment")


def _openssl() -> Finding:
    try:
        identity_of(b"")
    except ValueError as error:
        why = "connections between public addresses, and all between machines at the level encrypt, cannot be made"
        return Finding(Level.NOTE, "OpenSSL", str(error), why, "install the system's OpenSSL")
    return Finding(Level.GOOD, "OpenSSL", "can be loaded, so connections can be encrypted")


def _listeners() -> list[Finding]:
    jobs = _processes_of_jobs()
    found = sorted(listeners_of(jobs))
    if not found:
        running = f"none of {len(jobs)} processes of jobs" if jobs else "no job of this user runs here"
        return [Finding(Level.GOOD, "listeners", running)]
    return [_reach(each) for each in found]


def _processes_of_jobs() -> list[int]:
    """Returns this user's workers and the launchers above them."""
    workers = marked("")
    return sorted({*workers, *(parent for pid in workers if (parent := _parent(pid)) > 1)})


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _reach(listener: Listener) -> Finding:
    if listener.kind == "unix":
        return Finding(Level.GOOD, "listener", f"{listener}: reached from this machine only")
    address = ip_address(listener.address)
    if is_loopback(listener.address):
        return Finding(Level.GOOD, "listener", f"{listener}: reached from this machine only")
    if address.is_unspecified:
        why = "it listens on all interfaces; Paceline's own listeners have one address each"
        fix = "give the program that opened it an address to listen on"
        return Finding(Level.BAD, "listener", f"{listener}: reached from every network of this machine", why, fix)
    if address.is_global:
        why = "the address is public; those who connect must prove the job's secret, over TLS unless the level is auth"
        return Finding(Level.NOTE, "listener", f"{listener}: reached from the Internet", why, "use a firewall too")
    return Finding(Level.GOOD, "listener", f"{listener}: reached from the machines of its network")
