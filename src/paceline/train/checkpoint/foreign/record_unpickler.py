"""An unpickler that creates only plain values and inert records, and never accesses objects in the process.

Python's own unpickler trusts the objects that `find_class` returns. BUILD sets attributes on any object, even a class
or a function, and APPEND calls the `append` method of any object. A memo index of 2^31 allocates memory for 2^31
entries, and a deeply nested tuple as a key overflows the C stack. In this unpickler, a name in the pickle stays a name,
and calling it creates a `PickledRecord`. Only records have state, and keys are scalars or short flat tuples of scalars.
The memory use is proportional to the length of the pickle.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
"""A function that creates a value from a called name and its arguments. It must not copy the arguments."""


def unpickle(data: bytes, known: Callable[[Global], Make | None], key_of: Callable[[PickledRecord], object]) -> object:
    """Returns the content of a pickle (protocol 2 or later), with records in place of objects.

    Args:
        data: the pickle.
        known: a function that maps a name to the factory that replaces it in calls, such as `PickledRecord`, or to None
            to reject the name.
        key_of: a function that converts a record used as a key to a scalar or a flat tuple of scalars.

    Raises:
        UnneededPickleError: the pickle uses a rejected name, or an operation that records do not need.
        ValueError: the pickle is damaged.
    """
    return _Interpreter(data, known, key_of).run()


class _Interpreter:
    def __init__(
        self, data: bytes, known: Callable[[Global], Make | None], key_of: Callable[[PickledRecord], object]
    ) -> None:
        self._nbytes = len(data)
        self._file = io.BytesIO(data)
        self._read = self._file.read
        self._known = known
        self._key_of = key_of
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        while (code := self._read(1)) != b".":
            if code in _OPERATIONS:
                _OPERATIONS[code](self)
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
        if nbytes > _LONGEST_INT_NBYTES:
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
