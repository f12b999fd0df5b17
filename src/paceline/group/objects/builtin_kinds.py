"""The kinds of values that are sent as msgpack alone; their numbers are part of the format."""

from __future__ import annotations

import datetime
import uuid
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from pathlib import Path
from typing import Any

from paceline.group.exchange import as_memory, as_tensor
from paceline.group.objects.codec import Kind, MalformedPayload, Packer, Refused, Unpacker

_METADATA = "_metadata"  # Module.state_dict() sets this attribute on its result; load_state_dict reads it


def _pack_ordered(value: OrderedDict[Any, Any], packer: Packer) -> object:
    attributes = vars(value)
    if set(attributes) - {_METADATA}:
        raise Refused(f"an OrderedDict with the attributes {sorted(attributes)}, which would be lost; send dict(it)")
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
        raise Refused(
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


VALUES: dict[int, Kind] = {
    1: Kind(tuple, lambda v, p: p.pack_all(v), lambda v, u: tuple(u.unpack_all(v))),
    2: Kind(dict, lambda v, p: p.pack_items(v), lambda v, u: dict(u.unpack_items(v))),
    3: Kind(set, lambda v, p: p.pack_elements(v), lambda v, u: set(u.unpack_all(v))),
    4: Kind(frozenset, lambda v, p: p.pack_elements(v), lambda v, u: frozenset(u.unpack_all(v))),
    5: Kind(OrderedDict, _pack_ordered, _unpack_ordered),
    6: Kind(Counter, lambda v, p: p.pack_items(v), lambda v, u: Counter(dict(u.unpack_items(v)))),
    7: Kind(deque, lambda v, p: [p.pack_all(list(v)), v.maxlen], lambda v, u: deque(u.unpack_all(v[0]), v[1])),
    8: Kind(
        int,
        lambda v, p: v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True),
        lambda v, u: int.from_bytes(v, "little", signed=True),
    ),
    9: Kind(str, lambda v, p: v.encode("utf-8", "surrogatepass"), lambda v, u: v.decode("utf-8", "surrogatepass")),
    10: Kind(bytes, lambda v, p: p.buffer(as_tensor(v)), lambda v, u: bytes(as_memory(u.buffer(v)))),
    11: Kind(bytearray, lambda v, p: p.buffer(as_tensor(v)), lambda v, u: bytearray(as_memory(u.buffer(v)))),
    12: Kind(complex, lambda v, p: [v.real, v.imag], lambda v, u: complex(*v)),
    13: Kind(datetime.date, lambda v, p: [v.year, v.month, v.day], lambda v, u: datetime.date(*v)),
    14: Kind(datetime.time, _pack_time, _unpack_time),
    15: Kind(datetime.datetime, _pack_datetime, _unpack_datetime),
    16: Kind(datetime.timedelta, lambda v, p: [v.days, v.seconds, v.microseconds], lambda v, u: datetime.timedelta(*v)),
    17: Kind(datetime.timezone, lambda v, p: _pack_zone(v), lambda v, u: _unpack_zone(v)),
    18: Kind(Decimal, lambda v, p: str(v), lambda v, u: Decimal(v)),
    19: Kind(uuid.UUID, lambda v, p: v.bytes, lambda v, u: uuid.UUID(bytes=v)),
    20: Kind(type(Path()), lambda v, p: p.pack(str(v)), lambda v, u: Path(*u.unpack_all([v]))),
    21: Kind(range, lambda v, p: p.pack_all([v.start, v.stop, v.step]), lambda v, u: range(*u.unpack_all(v))),
}
