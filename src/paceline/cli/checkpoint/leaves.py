"""The plain values of a tree by their paths."""

from __future__ import annotations

import json

from paceline.checkpoint.format.values import Json


def leaves(value: Json, name: str = "") -> list[tuple[str, Json]]:
    """Returns the plain values of a tree with their paths; references to tensors are left out.

    >>> leaves({"step": 7, "rates": [0.1, {"$tensor": "a"}], "losses": []})
    [('step', 7), ('rates/0', 0.1), ('losses', [])]
    """
    if isinstance(value, dict) and set(value) == {"$tensor"}:
        return []
    members: list[tuple[str, Json]]
    if isinstance(value, dict) and not any(key.startswith("$") for key in value):
        members = list(value.items())
    elif isinstance(value, list):
        members = [(str(index), each) for index, each in enumerate(value)]
    elif isinstance(value, dict) and isinstance(inner := value.get("$tuple", value.get("$dict")), list):
        members = [(str(index), each) for index, each in enumerate(inner)]
        if "$dict" in value:
            members = [(json.dumps(pair[0]), pair[1]) for pair in inner if isinstance(pair, list)]
    else:
        return [(name, value)]
    if name and not members:
        return [(name, value)]
    return [leaf for key, each in members for leaf in leaves(each, f"{name}/{key}" if name else key)]
