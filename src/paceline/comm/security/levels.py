"""Security levels: PACELINE_SECURITY and the addresses of both ends determine which connections are encrypted.

    auth      no connections; every new connection is authenticated, as at every level except `none`
    encrypt   all connections between machines
    none      no connections, and none is authenticated; allowed on loopback, elsewhere only if PACELINE_INSECURE is 1

Without a level, connections between machines are encrypted if one of the two addresses is public. A connection within a
machine is never encrypted: a user who can read it can also read the memory of the processes.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # every worker imports this module, and importing typing takes time
if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

LEVEL_VARIABLE = "PACELINE_SECURITY"
INSECURE_VARIABLE = "PACELINE_INSECURE"
LEVELS = ("auth", "encrypt", "none")


def chosen_level() -> str | None:
    """Returns the level set for this job, or None.

    Raises:
        ValueError: PACELINE_SECURITY is not a level.
    """
    level = os.environ.get(LEVEL_VARIABLE) or None
    if level is not None and level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} is {level!r}; it must be one of {', '.join(LEVELS)}")
    return level


def choose_level(level: str) -> None:
    """Sets the level for this process and its children.

    Raises:
        ValueError: `level` is not a level, or the environment contains a different one.
    """
    if level not in LEVELS:
        raise ValueError(f"the security level is {level!r}; it must be one of {', '.join(LEVELS)}")
    given = chosen_level()
    if given not in (None, level):
        raise ValueError(
            f"the security level is {level!r} here and {given!r} in {LEVEL_VARIABLE}; leave one of them out"
        )
    os.environ[LEVEL_VARIABLE] = level


def is_insecure() -> bool:
    """Returns whether the level `none` may be used between machines."""
    return os.environ.get(INSECURE_VARIABLE) == "1"


def must_encrypt(own: str, peer: str, level: str | None) -> bool:
    """Returns whether a connection between two numeric addresses must be encrypted; both ends get the same result.

    >>> must_encrypt("10.0.0.1", "10.0.0.2", None), must_encrypt("10.0.0.1", "10.0.0.2", "encrypt")
    (False, True)
    >>> must_encrypt("10.0.0.1", "8.8.8.8", None), must_encrypt("10.0.0.1", "8.8.8.8", "auth")
    (True, False)
    >>> must_encrypt("10.0.0.1", "10.0.0.1", "encrypt"), must_encrypt("::1", "::1", "encrypt")
    (False, False)
    """
    if own == peer or level in ("auth", "none"):
        return False
    ends = [_address(own), _address(peer)]
    if any(end.is_loopback for end in ends):
        return False
    return level == "encrypt" or any(end.is_global for end in ends)


def is_loopback(address: str) -> bool:
    """Returns whether a numeric address is reachable only from this machine."""
    return _address(address).is_loopback


def _address(text: str) -> IPv4Address | IPv6Address:
    from ipaddress import IPv6Address, ip_address

    address = ip_address(text.split("%")[0])
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
