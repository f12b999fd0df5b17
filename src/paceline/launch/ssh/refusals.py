"""Says why a launcher did not start on another machine, and what to do, from what ssh and the shell there wrote."""

from __future__ import annotations

from dataclasses import dataclass

_SSH_FAILED = 255
_NOT_FOUND = (126, 127)


@dataclass(frozen=True)
class Attempt:
    """How a launcher was to be started: the machine as ssh is given it, the interpreter there, and our version."""

    destination: str
    python: str
    version: str
    is_here: bool = False  # without ssh


def why_not(attempt: Attempt, code: int, errors: str) -> str:
    """Returns a sentence for the user.

    Args:
        attempt: what was tried.
        code: the exit code of ssh, or of the interpreter if there was no ssh.
        errors: what came on stderr.
    """
    if code == _SSH_FAILED and not attempt.is_here:
        return f"{attempt.destination}: {_of_ssh(attempt, errors)}"
    python, install = attempt.python, f"-m pip install paceline=={attempt.version}"
    command = f"{python} {install}" if attempt.is_here else f"ssh {attempt.destination} {python} {install}"
    if "No module named" in errors and "paceline" in errors:
        return f"{attempt.destination}: {python} there has no paceline {attempt.version}; install it: {command}"
    if code in _NOT_FOUND:
        return (
            f"{attempt.destination}: there is no {python} there; install the same environment as here, or name the "
            "interpreter with --remote-python"
        )
    return f"{attempt.destination}: the launcher ended with code {code} before it answered: {_last(errors)}; try: " + (
        command if attempt.is_here else f"ssh {attempt.destination} {python} -m paceline --version"
    )


def other_version(attempt: Attempt, version: str) -> str:
    """Returns a sentence on a machine that runs another version of Paceline."""
    install = f"{attempt.python} -m pip install paceline=={attempt.version}"
    command = install if attempt.is_here else f"ssh {attempt.destination} {install}"
    return (
        f"{attempt.destination}: {attempt.python} has paceline {version} there, and this machine has "
        f"{attempt.version}; all machines of a job need the same: {command}"
    )


def no_answer(attempt: Attempt, waited_s: float) -> str:
    """Returns a sentence on a machine that did not answer in time."""
    return (
        f"{attempt.destination}: no launcher answered within {waited_s:.0f} s; try: ssh {attempt.destination} "
        f"{attempt.python} -m paceline --version"
    )


def _of_ssh(attempt: Attempt, errors: str) -> str:
    destination = attempt.destination
    if "IDENTIFICATION HAS CHANGED" in errors:
        return (
            "its host key is another than the one that this machine knows, so it may be another machine; if that is "
            f"right, remove the old key with ssh-keygen -R {destination.rpartition('@')[2]}"
        )
    if "Host key verification failed" in errors or "host key is known" in errors:
        return f"its host key is not known here; compare it and accept it once, with: ssh {destination} true"
    if "Permission denied" in errors or "Too many authentication failures" in errors:
        return (
            f"it refused this user's key, and nobody is asked for a password here: ssh-copy-id {destination}, or load "
            "the key with ssh-add"
        )
    if "Could not resolve" in errors:
        return "its name leads to no address; correct it in --hosts, or give it a HostName in ~/.ssh/config"
    if "Connection refused" in errors:
        return "nothing serves ssh there; start sshd, or give its Port in ~/.ssh/config"
    if any(words in errors for words in ("timed out", "No route to host", "Network is unreachable")):
        return f"it cannot be reached ({_last(errors)}); is it running, and does a firewall let ssh through?"
    return f"ssh failed ({_last(errors)}); try: ssh {destination} true"


def _last(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was said"
