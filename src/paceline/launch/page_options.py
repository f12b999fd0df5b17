"""What the flags say about the live page, apart from what it takes to serve it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from paceline.launch.values import OptionError


@dataclass(frozen=True)
class PageOptions:
    """Where the page is, under which names and paths proxies may serve it, and whether it may act."""

    port: int = 0
    socket: str | None = None
    prefix: str = ""
    hosts: tuple[str, ...] = ()
    acts: bool = False


def page_of(options: argparse.Namespace) -> PageOptions | None:
    """Returns what the flags say; None if there is to be no page.

    Raises:
        OptionError: a flag of the page contradicts another one or is not what it should be.
    """
    others = {
        "--dash-port": options.dash_port,
        "--dash-socket": options.dash_socket,
        "--dash-prefix": options.dash_prefix,
        "--dash-host": options.dash_host,
        "--dash-actions": options.dash_actions,
    }
    given = [name for name, value in others.items() if value]
    if not options.dash:
        if given:
            raise OptionError(f"{given[0]} says how the live page is served, but there is none without --dash")
        return None
    if options.dash_port and options.dash_socket:
        raise OptionError("--dash-port and --dash-socket exclude each other: the page is served in one place")
    prefix = options.dash_prefix.rstrip("/")
    if prefix and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", prefix):
        raise OptionError(f"--dash-prefix {options.dash_prefix!r} is not a path such as /user/ana/proxy/8080")
    hosts = tuple(host.strip().lower() for host in options.dash_host.split(",") if host.strip())
    if wrong := [host for host in hosts if not re.fullmatch(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]", host)]:
        raise OptionError(f"--dash-host {wrong[0]!r} is not the name of a host; give names without ports")
    return PageOptions(options.dash_port or 0, options.dash_socket, prefix, hosts, options.dash_actions)
