"""Unpicklers that create only plain values and inert records, and never access objects in the process.

Python's own unpickler trusts the objects that `find_class` returns. BUILD sets attributes on any object, even a class
or a function, and APPEND calls the `append` method of any object. A memo index of 2^31 allocates memory for 2^31
entries, and a deeply nested tuple as a key overflows the C stack. In this unpickler, a name in the pickle stays a name,
and calling it creates a `PickledRecord`. Only records have state, and keys are scalars or short flat tuples of scalars.
The memory use is proportional to the length of the pickle.

`unpickle` returns the records. `require_sound_torch_file` checks a file written by torch.save before torch reads it.
torch's weights-only unpickler runs no code, but it crashes on deeply nested keys, allocates memory of any size, and
enlarges a storage that is too small for its tensor.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format.safetensors_header import BEYOND, MOST_DIMENSIONS

_SCALARS = (str, int, float, bytes, type(None))  # bool is a subclass of int
_LONGEST_INT_NBYTES = 16
_LONGEST_KEY = 64  # maximum length of a tuple that is used as a key
_U8, _U16, _U32, _U64 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


class UnneededPickleError(Exception):
    """Raised if a pickle uses a name or an operation that its reader does not need; the message describes it."""


class _Mark:
    pass


_MARK = _Mark()


@dataclass(frozen=True)
class Global:
    """A qualified name in a pickle. The module is not imported."""

    module: str
    name: str


class PickledRecord:
    """An object in a pickle, represented by its state and by the call that would create it.

    Attributes:
        made_by: the name of the class or function that the pickle calls.
        args: the arguments of the call.
        fields: the attributes by name if the state is a dict, or None.
        state: the state if it is not a dict, or None.
    """

    def __init__(self, made_by: Global, args: tuple[object, ...]) -> None:
        self.made_by = made_by
        self.args = args
        self.fields: Mapping[object, object] | None = None
        self.state: object = None

    def __getitem__(self, name: str) -> object:
        """Returns an attribute, or None if it does not exist."""
        return None if self.fields is None else self.fields.get(name)


Make = Callable[[Global, tuple[object, ...]], object]
"""A function that creates a value from the name of a callable and its arguments. It must not copy the arguments."""


def unpickle(data: bytes, known: Callable[[Global], Make | None], key_of: Callable[[PickledRecord], object]) -> object:
    """Returns the content of a pickle (protocol 2 or later), with records in place of objects.

    Args:
        known: a function that maps the name of a callable to the factory that is called instead, such as
            `PickledRecord`, or to None to reject the name.
        key_of: a function that converts a record used as a key to a scalar or a flat tuple of scalars.

    Raises:
        UnneededPickleError: the pickle uses a rejected name, or an operation that records do not need.
        ValueError: the pickle is damaged.
    """
    return _Interpreter(io.BytesIO(data), len(data), known, key_of).run()


class _Interpreter:
    longest_int_nbytes = _LONGEST_INT_NBYTES
    operations: Mapping[bytes, Callable[[Any], object]] = MappingProxyType({})

    def __init__(
        self,
        file: BinaryIO,
        nbytes: int,
        known: Callable[[Global], Make | None],
        key_of: Callable[[PickledRecord], object],
    ) -> None:
        self._nbytes = nbytes
        self._file = file
        self._read = file.read
        self._known = known
        self._key_of = key_of
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        while (code := self._read(1)) != b".":
            if (operation := self.operations.get(code) or _OPERATIONS.get(code)) is not None:
                operation(self)
            elif code in _CONSTANTS:
                self._stack.append(_CONSTANTS[code])
            elif code:
                raise self._refuse(f"has the operation {code!r}")
            else:
                raise ValueError(f"its {self._nbytes:,} bytes end without an end of the pickle")
        return self._pop()

    def _take(self, nbytes: int) -> bytes:
        if nbytes > self._nbytes:  # checked first, because some numbers are too large for `read`
            raise ValueError(f"it has {self._nbytes:,} bytes, and a value of {nbytes:,}")
        part = self._read(nbytes)
        if len(part) < nbytes:
            raise ValueError(f"its {self._nbytes:,} bytes end within a value of {nbytes:,}")
        return part

    def _number(self, layout: struct.Struct) -> int:
        number: int = layout.unpack(self._take(layout.size))[0]
        return number

    def _line(self) -> str:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise self._damage("a name without an end")
        return line[:-1].decode()

    def _top(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            raise self._damage("too few values")
        return self._stack[-1]

    def _pop(self) -> object:
        self._top()
        return self._stack.pop()

    def _pop_to_mark(self) -> list[object]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise self._damage("too few marks")

    def _key(self, value: object) -> object:
        if isinstance(value, PickledRecord):
            value = self._key_of(value)
        parts = value if isinstance(value, tuple) else (value,)
        if len(parts) > _LONGEST_KEY or not all(isinstance(part, _SCALARS) for part in parts):
            raise self._refuse("has a key that is neither a scalar nor a flat tuple of scalars")
        return value

    def _refuse(self, what: str) -> UnneededPickleError:
        return UnneededPickleError(f"it {what} before byte {self._file.tell():,}")

    def _damage(self, what: str) -> ValueError:
        return ValueError(f"it has {what} before byte {self._file.tell():,}")

    def _name(self, module: str, name: str) -> None:
        found = Global(module, name)
        if self._known(found) is None:
            raise UnneededPickleError(f"it refers to {module}.{name}")
        self._stack.append(found)

    def name_in_lines(self) -> None:
        self._name(self._line(), self._line())

    def name_on_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self._refuse("has a name that is not text")
        self._name(module, name)

    def call(self) -> None:
        args, called = self._pop(), self._pop()
        make = self._known(called) if isinstance(called, Global) else None
        if make is None or not isinstance(called, Global) or not isinstance(args, tuple):
            raise self._refuse("calls something other than a name")
        self._stack.append(make(called, args))

    def build(self) -> None:
        state, record = self._pop(), self._top()
        if not isinstance(record, PickledRecord) or record.fields is not None or record.state is not None:
            raise self._refuse("gives a state to something other than a new record")
        if isinstance(state, dict):
            record.fields = state
        else:
            record.state = state

    def append(self) -> None:
        self._extend([self._pop()])

    def appends(self) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[object]) -> None:
        top = self._top()
        if not isinstance(top, list):
            raise self._refuse("appends to something other than a list")
        top.extend(values)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self._pop_to_mark())

    def _update(self, values: list[object]) -> None:
        top = self._top()
        if not isinstance(top, dict) or len(values) % 2:
            raise self._refuse("sets items of something other than a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            top[self._key(key)] = value

    def add_items(self) -> None:
        values, top = self._pop_to_mark(), self._top()
        if not isinstance(top, set):
            raise self._refuse("adds elements to something other than a set")
        top.update(map(self._key, values))

    def tuple_to_mark(self) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def number(self, layout: struct.Struct) -> None:
        self._stack.append(self._number(layout))

    def long_number(self, layout: struct.Struct) -> None:
        nbytes = self._number(layout)
        if nbytes > self.longest_int_nbytes:
            raise self._refuse(f"has a number of {nbytes:,} bytes")
        self._stack.append(int.from_bytes(self._take(nbytes), "little", signed=True))

    def text(self, layout: struct.Struct) -> None:
        self._stack.append(self._take(self._number(layout)).decode("utf-8", "surrogatepass"))

    def octets(self, layout: struct.Struct) -> None:
        self._stack.append(self._take(self._number(layout)))

    def remember(self, layout: struct.Struct | None) -> None:
        self._memo[len(self._memo) if layout is None else self._number(layout)] = self._top()

    def recall(self, layout: struct.Struct) -> None:
        index = self._number(layout)
        if index not in self._memo:
            raise self._damage(f"no value with the number {index:,}")
        self._stack.append(self._memo[index])


_CONSTANTS: dict[bytes, object] = {b"N": None, b"\x88": True, b"\x89": False, b")": (), b"(": _MARK}
_OPERATIONS: dict[bytes, Callable[[_Interpreter], object]] = {  # by operation code, as in Python's pickletools
    b"\x80": lambda it: it._take(1),  # the protocol
    b"\x95": lambda it: it._take(8),  # the length of a frame, which is not needed here
    b"0": _Interpreter._pop,
    b"1": _Interpreter._pop_to_mark,
    b"J": lambda it: it.number(_I32),
    b"K": lambda it: it.number(_U8),
    b"M": lambda it: it.number(_U16),
    b"G": lambda it: it.number(_F64),
    b"\x8a": lambda it: it.long_number(_U8),
    b"\x8b": lambda it: it.long_number(_U32),
    b"\x8c": lambda it: it.text(_U8),
    b"X": lambda it: it.text(_U32),
    b"\x8d": lambda it: it.text(_U64),
    b"C": lambda it: it.octets(_U8),
    b"B": lambda it: it.octets(_U32),
    b"\x8e": lambda it: it.octets(_U64),
    b"}": lambda it: it._stack.append({}),
    b"]": lambda it: it._stack.append([]),
    b"\x8f": lambda it: it._stack.append(set()),
    b"t": _Interpreter.tuple_to_mark,
    b"\x85": lambda it: it.tuple_of(1),
    b"\x86": lambda it: it.tuple_of(2),
    b"\x87": lambda it: it.tuple_of(3),
    b"a": _Interpreter.append,
    b"e": _Interpreter.appends,
    b"s": _Interpreter.set_item,
    b"u": _Interpreter.set_items,
    b"\x90": _Interpreter.add_items,
    b"c": _Interpreter.name_in_lines,
    b"\x93": _Interpreter.name_on_stack,
    b"R": _Interpreter.call,
    b"\x81": _Interpreter.call,
    b"b": _Interpreter.build,
    b"q": lambda it: it.remember(_U8),
    b"r": lambda it: it.remember(_U32),
    b"\x94": lambda it: it.remember(None),
    b"h": lambda it: it.recall(_U8),
    b"j": lambda it: it.recall(_U32),
}


# - Files written by torch.save

_PICKLE_RECORD = "/data.pkl"
_LEGACY_PICKLES = 5  # magic number, version, system, state and storage keys
_MOST_VALUES = 1 << 22
# The size of a record's header in a zip file. The lengths of the name and the extra field are at `_LENGTHS_AT`.
_LOCAL_HEADER_NBYTES, _LENGTHS_AT = 30, 26
# The size of an element in bytes, by storage class.
_SIZES_OF_STORAGES = {
    **dict.fromkeys(("UntypedStorage", "ByteStorage", "CharStorage", "BoolStorage"), 1),
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
# The size of an element in bytes, by dtype; only `_rebuild_tensor_v3` has a dtype, for types without a storage class.
_SIZES_OF_DTYPES = {"torch.uint16": 2, "torch.uint32": 4, "torch.uint64": 8, "torch.complex32": 4}


class PickledTable(dict[object, object]):
    """A dict with attributes, such as the OrderedDict of a module's `state_dict`."""

    attributes: object = None


class PickledStorage(PickledRecord):
    """A reference to the memory of a tensor, which is in the record `key`."""

    def __init__(self, key: str, count: int, itemsize: int) -> None:
        super().__init__(Global("", "storage"), ())
        self.key = key
        self.nbytes = count * itemsize
        self.itemsize = itemsize


def reason_of(error: Exception) -> str:
    """Extracts, from an error of torch's weights-only unpickler, the sentence that describes what it rejected."""
    _, _, reason = str(error).partition("WeightsUnpickler error: ")
    return (reason or str(error)).strip().split("\n")[0].split(". ")[0].removesuffix(".")


def require_sound_torch_file(file: BinaryIO, path: str) -> bool:
    """Checks a file written by torch.save without creating any of its objects.

    Returns False if the file is in the format used before torch 1.6, which is not a zip file. Raises
    CheckpointDamagedError if the file is truncated or inconsistent, and CheckpointError if it contains something that
    does not occur in states, such as a nested tensor.
    """
    try:
        is_zip = file.read(2) == b"PK"
        file.seek(0)
        if is_zip:
            _require_sound_zip(file, path)
        else:
            nbytes = file.seek(0, os.SEEK_END)
            file.seek(0)
            storages: dict[str, int] = {}
            for _ in range(_LEGACY_PICKLES):
                storages.update(_storages_in(file, nbytes))
            if sum(storages.values()) > nbytes:
                raise ValueError(f"its {nbytes:,} bytes are fewer than the {sum(storages.values()):,} of its tensors")
        file.seek(0)
    except UnneededPickleError as error:
        raise CheckpointError(
            f"{path} was not read: {error}, which a state of tensors and plain values does not"
        ) from None
    # zipfile raises NotImplementedError for a feature that it lacks, and RuntimeError for an encrypted record.
    except (ValueError, zipfile.BadZipFile, struct.error, NotImplementedError, OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointDamagedError(f"{path} cannot be read as a torch.save file: {error}") from None
    return is_zip


def _require_sound_zip(file: BinaryIO, path: str) -> None:
    """Checks the sizes of the records against the pickle, because torch does not do so for mapped files."""
    with zipfile.ZipFile(file) as archive:
        sizes = _sizes_of_records(path, archive, file)
        top = next((name.removesuffix(_PICKLE_RECORD) for name in sizes if name.endswith(_PICKLE_RECORD)), "")
        if f"{top}{_PICKLE_RECORD}" not in sizes:
            raise ValueError("it has no data.pkl")
        data = archive.read(f"{top}{_PICKLE_RECORD}")
    for key, nbytes in _storages_in(io.BytesIO(data), len(data)).items():
        if sizes.get(f"{top}/data/{key}") != nbytes:
            raise CheckpointDamagedError(
                f"{path} is inconsistent: a tensor of {nbytes:,} bytes is listed in its record {key}, which has "
                "another size"
            )


def _sizes_of_records(path: str, archive: zipfile.ZipFile, file: BinaryIO) -> dict[str, int]:
    """Returns the sizes of the records in bytes, by name; checks that none overlap and that none are compressed."""
    records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    ends = [*(record.header_offset for record in records[1:]), archive.start_dir]
    found: dict[str, int] = {}
    for record, end in zip(records, ends, strict=True):
        if record.compress_type != zipfile.ZIP_STORED:  # a small file could expand to any size
            raise CheckpointDamagedError(
                f"{path} is inconsistent: its record {record.filename} is compressed, which torch.save does not do"
            )
        file.seek(record.header_offset + _LENGTHS_AT)
        begin = record.header_offset + _LOCAL_HEADER_NBYTES + sum(struct.unpack("<HH", file.read(4)))
        if record.filename in found or begin + record.compress_size > end:
            raise CheckpointDamagedError(f"{path} is inconsistent: its record {record.filename} occurs twice")
        found[record.filename] = record.file_size
    return found


def _storages_in(file: BinaryIO, nbytes: int) -> dict[str, int]:
    """Returns the sizes in bytes of the storages to which a pickle from torch.save refers, by key."""
    interpreter = _TorchInterpreter(file, nbytes)
    whole = interpreter.run()
    if (count := _expanded(whole)) > max(_MOST_VALUES, nbytes):
        raise ValueError(f"it has {nbytes:,} bytes, but repeats its values until there are {min(count, BEYOND):,}")
    return interpreter.storages


def _expanded(whole: object) -> int:
    """Returns the number of values in a tree; a value that occurs several times is counted each time."""
    counts: dict[int, int | None] = {}  # by identity; None while the members are being counted
    stack: list[tuple[object, list[object] | None]] = [(whole, None)]
    while stack:
        value, members = stack.pop()
        if members is not None:
            counts[id(value)] = 1 + sum(counts.get(id(member)) or 1 for member in members)
        elif id(value) not in counts and (members := _members(value)):
            counts[id(value)] = None
            stack.append((value, members))
            containers = [member for member in members if isinstance(member, (dict, list, tuple, PickledRecord))]
            if any(counts.get(id(member), 0) is None for member in containers):
                raise ValueError("it is nested too deeply, or contains an object that contains itself")
            stack += [(member, None) for member in containers]
    return counts.get(id(whole)) or 1


def _members(value: object) -> list[object]:
    if isinstance(value, PickledTable):
        return [*value.keys(), *value.values(), value.attributes]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value.args, value.fields, value.state] if isinstance(value, PickledRecord) else []


class _TorchInterpreter(_Interpreter):
    """Interprets a pickle from torch.save, which may refer to any name, and collects the sizes of its storages."""

    longest_int_nbytes = 255

    def __init__(self, file: BinaryIO, nbytes: int) -> None:
        super().__init__(file, nbytes, lambda _: self._make, lambda record: id(record))
        self.storages: dict[str, int] = {}

    def _make(self, called: Global, args: tuple[object, ...]) -> object:
        name = f"{called.module}.{called.name}"
        if name == "collections.OrderedDict" and not args:
            return PickledTable()
        if name in ("collections.OrderedDict", "builtins.set", "__builtin__.set"):
            for member in args[0] if args and isinstance(args[0], (list, tuple)) else ():
                has_value = name.endswith("Dict") and isinstance(member, (list, tuple)) and member
                self._key(member[0] if has_value else member)
        elif called.name == "_rebuild_from_type_v2":
            func, _, inner, *_ = (*args, None, None, None)
            if not isinstance(func, Global) or not isinstance(inner, tuple):
                raise self._refuse("has a tensor that no function makes")
            self._make(func, inner)
        elif called.name.endswith(("Storage", "Tensor", "bytearray")):
            if any(isinstance(arg, int) for arg in args):
                raise self._refuse(f"requests memory by a call of {called.name}")
        elif name.startswith("torch._utils._rebuild_tensor") or called.name == "_rebuild_qtensor":
            self._require_within_storage(args)
        elif called.name in ("_rebuild_nested_tensor", "_rebuild_njt", "_rebuild_wrapper_subclass"):
            raise self._refuse(f"has a tensor without storage ({called.name})")
        return PickledRecord(called, args)

    def _require_within_storage(self, args: tuple[object, ...]) -> None:
        storage, offset, shape, strides, *more = (*args, None, None, None, None)
        if not isinstance(storage, PickledStorage):
            raise self._refuse("has a tensor without storage")
        numbers: list[object] = [offset]
        for sizes in (shape, strides):
            if not isinstance(sizes, (tuple, list)) or len(sizes) > MOST_DIMENSIONS:
                raise self._refuse("has a tensor whose shape is not a tuple of sizes")
            numbers += sizes
        if not all(type(number) is int and 0 <= number < BEYOND for number in numbers):
            raise self._refuse("has a tensor whose shape does not consist of sizes")
        assert isinstance(offset, int) and isinstance(shape, (tuple, list)) and isinstance(strides, (tuple, list))
        if len(shape) != len(strides):
            raise self._refuse("has a tensor with other numbers of sizes and strides")
        dtype = more[2] if len(more) > 2 else None
        itemsize = storage.itemsize
        if isinstance(dtype, Global):
            itemsize = _SIZES_OF_DTYPES.get(f"{dtype.module}.{dtype.name}", itemsize)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and (last + 1) * itemsize > storage.nbytes:
            raise self._damage(f"a tensor of {list(shape)} in a storage of {storage.nbytes:,} bytes")

    def _key(self, value: object) -> object:
        """Checks a key, which may contain nested tuples; hashing these takes time and stack space."""
        parts: list[object] = [value]
        for part in parts:  # grows, because tuples are replaced with their parts
            if isinstance(part, tuple) and len(parts) + len(part) <= _LONGEST_KEY:
                parts += part
            elif not isinstance(part, (*_SCALARS, PickledRecord, Global)):
                raise self._refuse("has a key that is neither a scalar nor a short tuple of scalars")
        return value

    def build(self) -> None:
        top = self._stack[-2] if len(self._stack) > 1 else None
        if not isinstance(top, PickledTable):
            super().build()
        else:
            top.attributes = self._pop()

    def persistent(self) -> None:
        found = self._pop()
        if not isinstance(found, tuple) or len(found) < 5 or found[0] not in ("storage", b"storage"):
            raise self._refuse("refers to something other than a storage")
        _, kind, key, _, count, *_ = found
        itemsize = _SIZES_OF_STORAGES.get(kind.name) if isinstance(kind, Global) else None
        if isinstance(key, bytes):
            key = key.decode("ascii", "replace")
        if itemsize is None or not isinstance(key, str) or type(count) is not int or not 0 <= count < BEYOND:
            raise self._refuse("refers to a storage of an unknown kind or size")
        storage = PickledStorage(key, count, itemsize)
        if self.storages.setdefault(key, storage.nbytes) != storage.nbytes:
            raise self._damage(f"two sizes of the storage {key}")
        self._stack.append(storage)

    def short_string(self) -> None:
        self._stack.append(self._take(self._number(_U8)).decode("latin-1"))

    operations: Mapping[bytes, Callable[[Any], object]] = MappingProxyType(
        {b"Q": persistent, b"U": short_string, b"b": build}
    )
