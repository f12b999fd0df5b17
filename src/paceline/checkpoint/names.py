"""Names of what a checkpoint holds: paths such as `model/layer.0.weight` and `optimizer/state/3/exp_avg`."""

from __future__ import annotations

from collections.abc import Collection

SEPARATOR = "/"
_OF_RANK = "@rank"


def join(name: str, *keys: object) -> str:
    """Returns the name of something within `name`.

    >>> join("model", "a/b", 3)
    'model/a%2Fb/3'
    """
    return SEPARATOR.join([name, *map(escaped, keys)] if name else map(escaped, keys))


def escaped(key: object) -> str:
    """Returns a key as one part of a name."""
    return str(key).replace("%", "%25").replace(SEPARATOR, "%2F").replace("@", "%40")


def unescaped(part: str) -> str:
    """Returns the key that `escaped` turned into a part of a name."""
    return part.replace("%40", "@").replace("%2F", SEPARATOR).replace("%25", "%")


def of_rank(name: str, rank: int) -> str:
    """Returns the name under which a rank keeps what differs between ranks.

    >>> of_rank("random", 3)
    'random@rank3'
    """
    return f"{name}{_OF_RANK}{rank}"


def some(names: Collection[str]) -> str:
    """Returns the first few of many names, for a message.

    >>> some({"b", "a"})
    "['a', 'b']"
    """
    return f"{sorted(names)[:5]}{' and others' if len(names) > 5 else ''}" if names else "none"
