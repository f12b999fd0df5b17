"""Conversion of Python objects to and from bytes, with msgpack and separate buffers for tensors, arrays and long bytes.

A decoded object is equal to the original and of the same type; objects for which this is impossible are rejected before
any data is sent. A body is one byte (`BodyFormat`) followed by msgpack or, if the sender allowed it, a pickle. Decoding
msgpack creates only objects of the types in `VALUES` and `ARRAYS`, so no class is looked up by name, and no code is
executed.

Numbers, short bytes, ASCII strings, lists, and dicts with ASCII strings as keys are msgpack's own types. Every other
object is encoded as a map with a single integer key, which is the tag of its `TypeCodec`; no other map has integer
keys. The tags are part of the format.

Two properties are lost: an object that occurs twice becomes two objects, and tensors become contiguous and no longer
share memory. An accelerator tensor is placed on the receiver's current device if it was on the sender's current device,
and otherwise on the receiver's device with the same type and index. If the receiver has no such device, the tensor is
placed on the CPU. NumPy is used only if the program has already imported it.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import pickle
import re
import sys
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
import torch

from paceline.comm.engine.adapters.device_streams import accelerator_in_use, current_accelerator
from paceline.comm.engine.channel import DTYPE_CODES, byte_view
from paceline.comm.group.buffers import as_memory, as_tensor

MAX_DEPTH = 128
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 64) - 1
_SMALL_BYTES = 4096  # longer bytes objects are sent in separate buffers
_PLAIN = frozenset({NoneType, bool, float})
_CONTAINERS = frozenset({list, dict})
_READABLE = frozenset({NoneType, bool, int, float, str, bytes, list, dict})


class BodyFormat(IntEnum):
    """The format of a body, given by its first byte."""

    MSGPACK = 1
    PICKLE = 2


class MalformedPayload(ValueError):
    """The bytes are not a valid encoding of an object."""


class PickleRefused(ValueError):
    """The bytes are a pickle, but pickles are not allowed."""


class UnsendableError(Exception):
    """A value cannot be sent; `path` is the path to the value, with the innermost step first."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []


@dataclass(frozen=True)
class EncodedObject:
    """An encoded object: `body`, and one-dimensional uint8 tensors that may share memory with the object."""

    body: bytearray
    buffers: list[torch.Tensor]


def encode(value: object, name: str, allow_pickle: bool = False) -> EncodedObject:
    """Encodes `value`; error messages refer to it as `name` and contain the path to an object that cannot be sent."""
    packer = Packer()
    try:
        body = bytearray([BodyFormat.MSGPACK])
        msgspec.msgpack.Encoder().encode_into(value if is_plain_msgpack(value) else packer.pack(value), body, -1)
        return EncodedObject(body, packer.buffers)
    except UnsendableError as refused:
        if allow_pickle:
            return EncodedObject(bytearray([BodyFormat.PICKLE]) + pickle.dumps(value), [])
        raise TypeError(f"{name}{''.join(reversed(refused.path))} is {refused}") from None


def decode(body: bytes | memoryview, buffers: Sequence[torch.Tensor], allow_pickle: bool = False) -> object:
    """Decodes the object that `encode` converted to `body` and `buffers`; it may share memory with `buffers`.

    Raises:
        MalformedPayload: the bytes do not encode an object.
        PickleRefused: the body is a pickle, but `allow_pickle` is false.
    """
    form = body[0] if len(body) else 0
    if form == BodyFormat.PICKLE and not allow_pickle:
        raise PickleRefused("the object is pickled")
    try:
        if form == BodyFormat.PICKLE:
            return pickle.loads(body[1:])
        if form == BodyFormat.MSGPACK:
            tree = msgspec.msgpack.decode(body[1:])
            return tree if is_plain_msgpack(tree) else Unpacker(buffers).unpack(tree)
    except Exception as error:  # malformed data from another process may cause any error
        raise MalformedPayload(f"{type(error).__name__}: {error}") from error
    raise MalformedPayload(f"the first byte is {form}")


@dataclasses.dataclass(frozen=True)
class TypeCodec:
    """The codec for a type with a tag: `pack` disassembles a value, and `unpack` reassembles it.

    The result of `pack` consists of msgpack's own types and of values returned by the methods of `Packer`.
    """

    type: type | None  # None if the type's module has not been imported
    pack: Callable[[Any, Packer], object]
    unpack: Callable[[Any, Unpacker], object]


class Packer:
    """Converts objects to msgpack's types and places large pieces of memory in `buffers`."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self._depth = 0

    def pack(self, value: Any) -> object:
        """Returns the encoded form of `value`, or `value` itself if msgpack can represent it."""
        if _is_leaf(value):
            return value
        if self._depth == MAX_DEPTH:
            raise UnsendableError(
                f"nested more than {MAX_DEPTH} levels deep, or contains itself; flatten it, or send its parts"
            )
        self._depth += 1
        kind = type(value)
        if kind is list:
            packed: object = self.pack_all(value)
        elif kind is dict and _is_map(value):
            values = value.values()
            packed_values = self.pack_all(values, value)
            packed = value if packed_values is values else dict(zip(value, packed_values, strict=True))
        else:
            tag = _TAGS.get(kind) or numpy_tag(kind)
            if tag is None:
                raise UnsendableError(_advice_for(value))
            packed = {tag: _KINDS[tag].pack(value, self)}
        self._depth -= 1
        return packed

    def pack_all(self, values: Collection[Any], keys: Iterable[object] | None = None) -> Collection[Any]:
        """Returns the encoded forms of `values`, or `values` itself if msgpack can represent all of them.

        Error messages identify the values by their `keys`, or by their positions.
        """
        if _are_leaves_of_one_kind(values):
            return values
        packed: list[object] | None = None
        index = 0
        try:
            for index, value in enumerate(values):
                if not _is_leaf(value):
                    encoded = self.pack(value)
                    if encoded is not value:
                        packed = list(values) if packed is None else packed
                        packed[index] = encoded
        except UnsendableError as refused:
            refused.path.append(f"[{index if keys is None else list(keys)[index]!r}]")
            raise
        return values if packed is None else packed

    def pack_items(self, items: dict[Any, Any]) -> list[object]:
        """Returns the list of keys followed by the list of values."""
        keys = list(items)
        return [self.pack_elements(keys), self.pack_all(list(items.values()), keys)]

    def pack_elements(self, elements: Iterable[Any]) -> Collection[Any]:
        """Returns the encoded forms of keys or set elements, which error messages do not identify by position."""
        listed = list(elements)
        try:
            return self.pack_all(listed)
        except UnsendableError as refused:
            refused.path[-1] = ", in a key or an element of a set,"
            raise

    def buffer(self, memory: torch.Tensor) -> int:
        """Adds `memory` (one-dimensional, uint8) to the buffers that accompany the body; returns the buffer's index."""
        self.buffers.append(memory)
        return len(self.buffers) - 1


class Unpacker:
    """Reassembles objects that a `Packer` disassembled."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers

    def unpack(self, node: object) -> object:
        """Returns the object that `node` encodes."""
        if type(node) is list:
            return self.unpack_all(node)
        if type(node) is dict:
            if set(map(type, node)) <= {str}:
                if _has_containers(node.values()):
                    for key, value in node.items():
                        if type(value) in _CONTAINERS:
                            node[key] = self.unpack(value)
                return node
            ((tag, packed),) = node.items()
            return _KINDS[tag].unpack(packed, self)
        if type(node) not in _READABLE:
            raise MalformedPayload(f"{type(node).__name__} does not encode a value")
        return node

    def unpack_all(self, nodes: object) -> list[Any]:
        """Returns the objects that `nodes` encode, in the same order."""
        if type(nodes) is not list:
            raise MalformedPayload(f"{type(nodes).__name__} instead of a list")
        if _has_containers(nodes):
            for index, node in enumerate(nodes):
                if type(node) in _CONTAINERS:
                    nodes[index] = self.unpack(node)
        return nodes

    def unpack_items(self, packed: object) -> list[tuple[Any, Any]]:
        """Returns the pairs of keys and values that `Packer.pack_items` encoded."""
        keys, values = self.unpack_all(packed)
        return list(zip(keys, values, strict=True))

    def buffer(self, number: object) -> torch.Tensor:
        """Returns the buffer with this index that was sent along with the body."""
        if type(number) is not int or not 0 <= number < len(self._buffers):
            raise MalformedPayload(f"buffer {number!r} does not exist")
        return self._buffers[number]


def is_plain_msgpack(value: object) -> bool:
    """Returns True if `value` consists of msgpack's own types; checks level by level and is much faster than `pack`."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        kinds = set(map(type, level)) - _PLAIN
        if not kinds <= _READABLE:
            return False
        of_kind: dict[type, list[Any]] = {kind: [item for item in level if type(item) is kind] for kind in kinds}
        lists, dicts = of_kind.get(list, []), of_kind.get(dict, [])
        keys = list(chain.from_iterable(dicts))
        integers = of_kind.get(int, [0])
        if (
            not set(map(type, keys)) <= {str}
            or not all(map(str.isascii, chain(keys, of_kind.get(str, []))))
            or min(integers) < _SMALLEST_INT
            or max(integers) > _LARGEST_INT
            or max(map(len, of_kind.get(bytes, [b""]))) >= _SMALL_BYTES
        ):
            return False
        if not lists and not dicts:
            return True
        level = list(chain(chain.from_iterable(lists), chain.from_iterable(map(dict.values, dicts))))
    return False


def _is_leaf(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(_SMALLEST_INT <= value <= _LARGEST_INT)
    if kind is str:
        return bool(value.isascii())
    return kind in _PLAIN or (kind is bytes and len(value) < _SMALL_BYTES)


def _are_leaves_of_one_kind(values: Collection[Any]) -> bool:
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return True
    if kinds == {int}:
        return bool(min(values) >= _SMALLEST_INT and max(values) <= _LARGEST_INT)
    return kinds == {str} and all(map(str.isascii, values))


def _is_map(value: dict[Any, Any]) -> bool:
    return set(map(type, value)) <= {str} and all(map(str.isascii, value))


def _has_containers(nodes: Collection[object]) -> bool:
    kinds = set(map(type, nodes))
    if not kinds <= _READABLE:
        raise MalformedPayload(f"{sorted(kind.__name__ for kind in kinds - _READABLE)} do not encode a value")
    return not kinds.isdisjoint(_CONTAINERS)


def _advice_for(value: object) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return (
        f"a {name}, which cannot be sent between ranks; {_instead_of(value)}, or pass allow_pickle=True on every rank "
        "if you trust them all (a pickle can run any code where it is read)"
    )


def _instead_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "send a plain tensor (tensor.detach().as_subclass(torch.Tensor))"
    if dataclasses.is_dataclass(value):
        return "send dataclasses.asdict(it)"
    if isinstance(value, enum.Enum):
        return "send its .value"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "send its ._asdict()"
    for plain in (dict, list, tuple, str, bytes, int, float):
        if isinstance(value, plain):
            return f"send {plain.__name__}(it)"
    return "send a dict, list or tuple of its contents"


_METADATA = "_metadata"  # the attribute of a state dict that Module.state_dict() sets and load_state_dict reads


def _pack_ordered(value: OrderedDict[Any, Any], packer: Packer) -> object:
    attributes = vars(value)
    if set(attributes) - {_METADATA}:
        raise UnsendableError(
            f"an OrderedDict with the attributes {sorted(attributes)}, which would be lost; send dict(it)"
        )
    return [*packer.pack_items(value), packer.pack(attributes)]


def _unpack_ordered(packed: Any, unpacker: Unpacker) -> object:
    keys, values, attributes = unpacker.unpack_all(packed)
    if set(attributes) - {_METADATA}:
        raise MalformedPayload(f"an OrderedDict with the attributes {sorted(attributes)}")
    ordered = OrderedDict(zip(keys, values, strict=True))
    vars(ordered).update(attributes)
    return ordered


def _pack_zone(zone: datetime.tzinfo | None) -> object:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise UnsendableError(
            f"a time in the zone {zone} ({type(zone).__qualname__}), whose rules may differ on another host; "
            "send its .astimezone(datetime.timezone.utc)"
        )
    offset = zone.utcoffset(None)
    return [offset // datetime.timedelta(microseconds=1), zone.tzname(None)]


def _unpack_zone(packed: Any) -> datetime.timezone | None:
    if packed is None:
        return None
    offset_us, name = packed
    zone = datetime.timezone(datetime.timedelta(microseconds=offset_us))
    return zone if zone.tzname(None) == name else datetime.timezone(zone.utcoffset(None), name)


def _pack_time(value: datetime.time, packer: Packer) -> object:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _pack_zone(value.tzinfo)]


def _unpack_time(packed: Any, unpacker: Unpacker) -> datetime.time:
    hour, minute, second, microsecond, fold, zone = packed
    return datetime.time(hour, minute, second, microsecond, _unpack_zone(zone), fold=fold)


def _pack_datetime(value: datetime.datetime, packer: Packer) -> object:
    return [value.year, value.month, value.day, _pack_time(value.timetz(), packer)]


def _unpack_datetime(packed: Any, unpacker: Unpacker) -> object:
    year, month, day, clock = packed
    return datetime.datetime.combine(datetime.date(year, month, day), _unpack_time(clock, unpacker))


VALUES: dict[int, TypeCodec] = {
    1: TypeCodec(tuple, lambda v, p: p.pack_all(v), lambda v, u: tuple(u.unpack_all(v))),
    2: TypeCodec(dict, lambda v, p: p.pack_items(v), lambda v, u: dict(u.unpack_items(v))),
    3: TypeCodec(set, lambda v, p: p.pack_elements(v), lambda v, u: set(u.unpack_all(v))),
    4: TypeCodec(frozenset, lambda v, p: p.pack_elements(v), lambda v, u: frozenset(u.unpack_all(v))),
    5: TypeCodec(OrderedDict, _pack_ordered, _unpack_ordered),
    6: TypeCodec(Counter, lambda v, p: p.pack_items(v), lambda v, u: Counter(dict(u.unpack_items(v)))),
    7: TypeCodec(deque, lambda v, p: [p.pack_all(list(v)), v.maxlen], lambda v, u: deque(u.unpack_all(v[0]), v[1])),
    8: TypeCodec(
        int,
        lambda v, p: v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True),
        lambda v, u: int.from_bytes(v, "little", signed=True),
    ),
    9: TypeCodec(str, lambda v, p: v.encode("utf-8", "surrogatepass"), lambda v, u: v.decode("utf-8", "surrogatepass")),
    10: TypeCodec(bytes, lambda v, p: p.buffer(as_tensor(v)), lambda v, u: bytes(as_memory(u.buffer(v)))),
    11: TypeCodec(bytearray, lambda v, p: p.buffer(as_tensor(v)), lambda v, u: bytearray(as_memory(u.buffer(v)))),
    12: TypeCodec(complex, lambda v, p: [v.real, v.imag], lambda v, u: complex(*v)),
    13: TypeCodec(datetime.date, lambda v, p: [v.year, v.month, v.day], lambda v, u: datetime.date(*v)),
    14: TypeCodec(datetime.time, _pack_time, _unpack_time),
    15: TypeCodec(datetime.datetime, _pack_datetime, _unpack_datetime),
    16: TypeCodec(
        datetime.timedelta, lambda v, p: [v.days, v.seconds, v.microseconds], lambda v, u: datetime.timedelta(*v)
    ),
    17: TypeCodec(datetime.timezone, lambda v, p: _pack_zone(v), lambda v, u: _unpack_zone(v)),
    18: TypeCodec(Decimal, lambda v, p: str(v), lambda v, u: Decimal(v)),
    19: TypeCodec(uuid.UUID, lambda v, p: v.bytes, lambda v, u: uuid.UUID(bytes=v)),
    20: TypeCodec(type(Path()), lambda v, p: p.pack(str(v)), lambda v, u: Path(*u.unpack_all([v]))),
    21: TypeCodec(range, lambda v, p: p.pack_all([v.start, v.stop, v.step]), lambda v, u: range(*u.unpack_all(v))),
}

_DTYPES = {str(dtype): dtype for dtype in DTYPE_CODES}
_ALL_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NDARRAY, _NUMPY_SCALAR = 35, 36
_NUMPY_TYPE = re.compile(r"[<>=|]?([?bBhHiIlLqQefdgFDG]|[mM]8(\[\d*\w+\])?|[SU][1-9]\d{0,8})")


def _pack_tensor(tensor: torch.Tensor, packer: Packer) -> object:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise UnsendableError(
            f"a tensor of layout {tensor.layout}, nested or quantized; send tensor.to_dense() or its parts"
        )
    accelerator = accelerator_in_use()
    if not tensor.is_cpu and (accelerator is None or tensor.device.type != accelerator.type):
        raise UnsendableError(f"a tensor on {tensor.device}, which the receiver may not have; send tensor.cpu()")
    if tensor.dtype not in DTYPE_CODES:
        raise UnsendableError(f"a tensor of {tensor.dtype}; convert it first (tensor.to(...))")
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    packed = [str(tensor.dtype), list(tensor.shape), tensor.requires_grad, packer.buffer(byte_view(dense))]
    if not tensor.is_cpu:
        index = tensor.device.index
        packed += [tensor.device.type, -1 if index == torch.accelerator.current_device_index() else index]
    return packed


def _unpack_tensor(packed: Any, unpacker: Unpacker) -> torch.Tensor:
    name, shape, requires_grad, number, *device = packed
    memory, dtype = unpacker.buffer(number), _DTYPES[name]
    tensor = memory.view(dtype).view(_shape(shape, memory.nbytes, dtype.itemsize))
    return (tensor.to(_own_device(*device)) if device else tensor).requires_grad_(requires_grad is True)


def _own_device(type: str, index: int) -> torch.device:
    """Returns this process's device for a received tensor; a negative index denotes the current device."""
    accelerator = current_accelerator()
    if accelerator is None or accelerator.type != type or index >= torch.accelerator.device_count():
        return torch.device("cpu")
    return torch.device(type, torch.accelerator.current_device_index() if index < 0 else index)


def _unpack_parameter(packed: Any, unpacker: Unpacker) -> object:
    tensor = _unpack_tensor(packed, unpacker)
    return torch.nn.Parameter(tensor.detach(), tensor.requires_grad)


def _pack_ndarray(array: Any, packer: Packer) -> object:
    import numpy

    name = _type_name(array.dtype)
    flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    memory = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
    return [name, list(array.shape), packer.buffer(memory)]


def _unpack_ndarray(packed: Any, unpacker: Unpacker) -> object:
    name, shape, number = packed
    memory, dtype = unpacker.buffer(number), _numpy_type(name)
    return memory.numpy().view(dtype).reshape(_shape(shape, memory.nbytes, dtype.itemsize))


def _unpack_scalar(packed: Any, unpacker: Unpacker) -> object:
    import numpy

    name, data = packed
    (scalar,) = numpy.frombuffer(data, _numpy_type(name))
    return scalar


def _type_name(dtype: Any) -> str:
    name = dtype.str if dtype.kind in "mMSU" else (">" if dtype.byteorder == ">" else "=") + dtype.char
    if not _NUMPY_TYPE.fullmatch(name):
        raise UnsendableError(f"a NumPy array of {dtype}; send its .tolist(), or the columns of a structured one")
    return str(name)


def _numpy_type(name: object) -> Any:
    import numpy

    if type(name) is not str or not _NUMPY_TYPE.fullmatch(name):
        raise MalformedPayload(f"the NumPy type {name!r}")
    return numpy.dtype(name)


def _shape(packed: object, nbytes: int, itemsize: int) -> list[int]:
    if type(packed) is not list or not all(type(size) is int and size >= 0 for size in packed):
        raise MalformedPayload(f"the shape {packed!r}")
    if math.prod(packed) * itemsize != nbytes:
        raise MalformedPayload(f"{nbytes} bytes for a shape of {packed} with {itemsize} bytes an element")
    return packed


ARRAYS: dict[int, TypeCodec] = {
    30: TypeCodec(torch.Tensor, _pack_tensor, _unpack_tensor),
    31: TypeCodec(torch.nn.Parameter, _pack_tensor, _unpack_parameter),
    32: TypeCodec(torch.Size, lambda v, p: list(v), lambda v, u: torch.Size(v)),
    33: TypeCodec(torch.dtype, lambda v, p: str(v), lambda v, u: _ALL_DTYPES[v]),
    34: TypeCodec(torch.device, lambda v, p: str(v), lambda v, u: torch.device(v)),
    _NDARRAY: TypeCodec(None, _pack_ndarray, _unpack_ndarray),
    _NUMPY_SCALAR: TypeCodec(None, lambda v, p: [_type_name(v.dtype), v.tobytes()], _unpack_scalar),
}

_KINDS = {**VALUES, **ARRAYS}
_TAGS = {kind.type: tag for tag, kind in _KINDS.items() if kind.type is not None}


def numpy_tag(kind: type) -> int | None:
    """Returns the tag of a NumPy type, or None if `kind` is not a NumPy type or has no tag."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if kind is numpy.ndarray:
        return _NDARRAY
    if issubclass(kind, numpy.generic) and kind.__module__ == "numpy" and numpy.dtype(kind).kind in "biufcmM":
        return _NUMPY_SCALAR
    return None
