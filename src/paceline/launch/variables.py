"""Checks the PACELINE_* variables before any worker starts, since a mistake in one would end every worker.

What a variable may be is decided where it is read. Each of these modules is imported only if its variable is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping


def _algorithm(text: str) -> None:
    from paceline.engine.algorithms import known_algorithm

    known_algorithm(text)


def _streams(text: str) -> None:
    from paceline.engine.algorithms import parse_streams

    parse_streams(text)


def _costs(text: str) -> None:
    from paceline.engine.algorithms import parse_costs

    parse_costs(text)


def _network(text: str) -> None:
    from paceline.engine.native.uneven import parse_network

    parse_network(text)


def _checks(text: str) -> None:
    from paceline.parallel.health.settings import parse_checks

    parse_checks(text)


def _port(_: str) -> None:
    from paceline.one_port.choice import chosen_port

    chosen_port()


def _security(_: str) -> None:
    from paceline.security.levels import chosen_level

    chosen_level()


def _compat(text: str) -> None:
    from argparse import ArgumentTypeError

    from paceline.launch.compat import VARIABLE, libraries

    try:
        libraries(text)
    except ArgumentTypeError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def _interface(text: str) -> None:
    from paceline.engine.addresses import own_address

    own_address(None, text)


def _congestion(text: str) -> None:
    from paceline.engine.native.congestion import require_control

    require_control(text)


def _one_of(name: str, *choices: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if text not in choices:
            raise ValueError(f"{name} is {text!r}; it must be {' or '.join(choices)}")

    return check


def _any(_: str) -> None:
    pass


_CHECKS: Mapping[str, Callable[[str], None]] = {
    "PACELINE_ALGORITHM": _algorithm,
    "PACELINE_CHECKS": _checks,
    "PACELINE_COMPAT": _compat,
    "PACELINE_COSTS": _costs,
    "PACELINE_FAILPOINTS": _any,
    "PACELINE_INSECURE": _one_of("PACELINE_INSECURE", "1", "0"),
    "PACELINE_NCCL_LIBRARY": _any,
    "PACELINE_NCCL_SHARED_GPU": _any,
    "PACELINE_NETWORK": _network,
    "PACELINE_NODES": _any,
    "PACELINE_PORT": _port,
    "PACELINE_RECORD": _one_of("PACELINE_RECORD", "on", "off"),
    "PACELINE_RUNS_DIR": _any,
    "PACELINE_SECRET": _any,
    "PACELINE_SECRET_FILE": _any,
    "PACELINE_SECURITY": _security,
    "PACELINE_STREAMS": _streams,
}
_BETWEEN_MACHINES: Mapping[str, Callable[[str], None]] = {
    "PACELINE_CONGESTION": _congestion,
    "PACELINE_IFACE": _interface,
}
# What launchers set for their workers, one of which may have started this launcher.
_OF_WORKERS = {
    *("CGROUP", "COMPAT_TOLD", "COPIES", "ELASTIC_FD", "ERROR_FILE", "GATE", "JOB", "RECORD_DIR", "RECORD_FD"),
    *("SECRET_FD", "STDIN", "STORE", "TERMINAL", "TORCH_STORE", "TORCH_STORE_REQUESTS", "WORKER"),
}
_NEAR = 0.75


def check_variables(has_other_machines: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Checks the value of every variable that workers read.

    Args:
        has_other_machines: whether the workers connect to other machines.
        environment: the variables.

    Raises:
        ValueError: a value is wrong; the message names the variable, the value and what it must be.
    """
    checks = {**_CHECKS, **_BETWEEN_MACHINES} if has_other_machines else _CHECKS
    for name, check in checks.items():
        if text := environment.get(name):
            check(text)


def misspelt(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yields a sentence for each variable that has no effect and whose name is nearly that of one that has."""
    prefix = "PACELINE_"
    known = [name.removeprefix(prefix) for name in (*_CHECKS, *_BETWEEN_MACHINES)]
    for name in sorted(environment):
        word = name.removeprefix(prefix)
        if word == name or word in known or word in _OF_WORKERS:
            continue
        from difflib import get_close_matches

        if near := get_close_matches(word, known, n=1, cutoff=_NEAR):
            yield f"the environment variable {name} is not known and has no effect; did you mean {prefix}{near[0]}?"
