"""Lossless JSON encoding for plain values, and the names of tensors and values in a checkpoint.

A value of a type that JSON lacks is encoded as an object with a single member, whose name begins with $. Names are
paths such as `model/layer.0.weight` and `optimizer/state/3/exp_avg`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

SEPARATOR = "/"
_OF_RANK = "@rank"


def join(name: str, *keys: object) -> str:
    """Returns the name of a member within `name`.

    >>> join("model", "a/b", 3)
    'model/a%2Fb/3'
    """
    return SEPARATOR.join([name, *map(escaped, keys)] if name else map(escaped, keys))


def escaped(key: object) -> str:
    """Escapes a key for use as one component of a name."""
    return str(key).replace("%", "%25").replace(SEPARATOR, "%2F").replace("@", "%40")


def unescaped(part: str) -> str:
    """Returns the key from which `escaped` created this component of a name, as a string."""
    return part.replace("%40", "@").replace("%2F", SEPARATOR).replace("%25", "%")


def first_key(name: str) -> str:
    """Returns the first component of a name, as `escaped` returned it.

    >>> first_key("model/weight"), first_key("random@rank3/torch")
    ('model', 'random')
    """
    return name.partition(SEPARATOR)[0].partition("@")[0]


def of_rank(name: str, rank: int) -> str:
    """Returns the name under which a rank saves its own copy of a value.

    >>> of_rank("random", 3)
    'random@rank3'
    """
    return f"{name}{_OF_RANK}{rank}"


def without_rank(name: str) -> tuple[str, int | None]:
    """Splits a name into the value's name and the rank (or None) that saved this copy; the inverse of `of_rank`.

    >>> without_rank("random@rank3/torch"), without_rank("epoch")
    (('random/torch', 3), ('epoch', None))
    """
    before, found, after = name.partition(_OF_RANK)
    rank, separator, rest = after.partition(SEPARATOR)
    return before + separator + rest, int(rank) if found else None


def some(names: Collection[str]) -> str:
    """Formats the first few names for a message.

    >>> some({"b", "a"})
    "['a', 'b']"
    """
    return f"{sorted(names)[:5]}{' and others' if len(names) > 5 else ''}" if names else "none"


if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
else:
    Json = object  # `object`, because msgspec does not decode recursive types

_LARGEST_INT = 2**63 - 1  # larger integers are encoded as strings


@dataclass(frozen=True)
class TensorRef:
    """A reference, in a tree of values, to a tensor in the checkpoint."""

    name: str


@dataclass(frozen=True)
class DType:
    """A dtype, represented by its safetensors name."""

    name: str


def encode(value: object, where: str = "the value") -> Json:
    """Encodes a value as JSON.

    The value can be None, bool, int, float, str, bytes, complex, `TensorRef`, `DType`, or a list, tuple, set, frozenset
    or dict of such values. For any other type, raises a TypeError that contains `where`, the value's name.
    """
    if value is None or type(value) in (bool, str):
        return value  # type: ignore[return-value]
    if type(value) is list:
        return [encode(member, f"{where}[{index}]") for index, member in enumerate(value)]
    if type(value) is dict:
        return _encode_dict(value, where)
    write = _WRITERS.get(type(value))
    if write is None:
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot contain: it "
            "can contain tensors, None, bool, int, float, complex, str, bytes, list, tuple, set and dict, and, in "
            "dicts only, objects with state_dict and load_state_dict"
        )
    return write(value, where)


def _encode_dict(value: dict[object, object], where: str) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {str(key): encode(member, f"{where}[{key!r}]") for key, member in value.items()}
    pairs = value.items()
    return {"$dict": [[encode(key, f"a key of {where}"), encode(kept, f"{where}[{key!r}]")] for key, kept in pairs]}


_WRITERS: dict[type, Callable[..., Json]] = {
    int: lambda value, where: value if abs(value) <= _LARGEST_INT else {"$int": str(value)},
    float: lambda value, where: value if math.isfinite(value) else {"$float": repr(value)},
    complex: lambda value, where: {"$complex": [encode(value.real), encode(value.imag)]},
    bytes: lambda value, where: {"$bytes": base64.b64encode(value).decode()},
    tuple: lambda value, where: {"$tuple": encode(list(value), where)},
    set: lambda value, where: {"$set": encode(sorted(value, key=repr), where)},
    frozenset: lambda value, where: {"$frozenset": encode(sorted(value, key=repr), where)},
    TensorRef: lambda value, where: {"$tensor": value.name},
    DType: lambda value, where: {"$dtype": value.name},
}


def decode(value: Json) -> object:
    """Decodes a value encoded by `encode`; raises ValueError for an unknown tag, or one with an invalid member."""
    if isinstance(value, list):
        return [decode(member) for member in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(member) for key, member in value.items()}
    read = _READERS.get(tag)
    if read is None or len(value) != 1:
        raise ValueError(f"the tag {tag!r} is not known; the known tags are {', '.join(sorted(_READERS))}")
    try:
        return read(value[tag])
    except (TypeError, ValueError) as error:
        raise ValueError(f"the tag {tag!r} has invalid contents: {error}") from None


def _decode_list(value: Json) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} instead of a list")
    return [decode(member) for member in value]


def _decode_dict(value: Json) -> dict[object, object]:
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} instead of a list of pairs")
    return dict(map(_pair, value))


def _pair(value: Json) -> tuple[object, object]:
    key, member = _decode_list(value)
    return key, member


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    return value


def _decode_complex(value: Json) -> complex:
    real, imaginary = _decode_list(value)
    if not isinstance(real, (int, float)) or not isinstance(imaginary, (int, float)):
        raise TypeError("not a pair of numbers")
    return complex(real, imaginary)


_READERS: dict[str, Callable[[Json], object]] = {
    "$int": lambda value: int(_text(value)),
    "$float": lambda value: float(_text(value)),
    "$complex": _decode_complex,
    "$bytes": lambda value: base64.b64decode(_text(value), validate=True),
    "$tuple": lambda value: tuple(_decode_list(value)),
    "$set": lambda value: set(_decode_list(value)),
    "$frozenset": lambda value: frozenset(_decode_list(value)),
    "$dict": _decode_dict,
    "$tensor": lambda value: TensorRef(_text(value)),
    "$dtype": lambda value: DType(_text(value)),
}


def tensors_in(value: Json) -> set[str]:
    """Returns the names of the tensors that a tree of encoded values refers to."""
    if isinstance(value, list):
        return set().union(*map(tensors_in, value))
    if not isinstance(value, dict):
        return set()
    if len(value) == 1 and isinstance(name := value.get("$tensor"), str):
        return {name}
    return set().union(*map(tensors_in, value.values()))
