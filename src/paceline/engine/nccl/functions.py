"""Declares NCCL's C functions for ctypes: prototypes, structures and result codes.

The numbers are those of `nccl.h`, which never changes existing ones. Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from enum import IntEnum

UNIQUE_ID_BYTES = 128
_UNDEFINED = -(1 << 31)
_CONFIG_MAGIC = 0xCAFEBEEF
# The version of the structure below, not of the library: newer libraries take further fields from their own defaults.
_CONFIG_VERSION = 21400


class Result(IntEnum):
    """The result of an NCCL function (`ncclResult_t`)."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


class NcclError(Exception):
    """NCCL refused a call or failed in it; the message contains NCCL's description of the error."""


class UniqueId(ctypes.Structure):
    """The id that the ranks of a communicator share (`ncclUniqueId`); NCCL takes it by value."""

    _fields_ = [("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """The part of `ncclConfig_t` that every version since 2.14 has, with the field that fills its last eight bytes."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
    ]


def without_blocking() -> Config:
    """Returns the configuration of a communicator whose calls return at once."""
    return Config(ctypes.sizeof(Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0, _UNDEFINED)


_address = ctypes.c_void_p
_communicator = ctypes.c_void_p
_stream = ctypes.c_void_p
_count = ctypes.c_size_t
_int = ctypes.c_int
_text = ctypes.c_char_p

_PROTOTYPES: Mapping[str, tuple[type, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_int),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(_communicator),
        _int,
        UniqueId,
        _int,
        ctypes.POINTER(Config),
    ),
    "ncclCommGetAsyncError": (_communicator, ctypes.POINTER(_int)),
    "ncclCommCount": (_communicator, ctypes.POINTER(_int)),
    "ncclCommUserRank": (_communicator, ctypes.POINTER(_int)),
    "ncclCommFinalize": (_communicator,),
    "ncclCommDestroy": (_communicator,),
    "ncclCommAbort": (_communicator,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_address, _address, _count, _int, _int, _communicator, _stream),
    "ncclBroadcast": (_address, _address, _count, _int, _int, _communicator, _stream),
    "ncclReduce": (_address, _address, _count, _int, _int, _int, _communicator, _stream),
    "ncclAllGather": (_address, _address, _count, _int, _communicator, _stream),
    "ncclReduceScatter": (_address, _address, _count, _int, _int, _communicator, _stream),
    "ncclSend": (_address, _count, _int, _int, _communicator, _stream),
    "ncclRecv": (_address, _count, _int, _int, _communicator, _stream),
}
_TEXTS: Mapping[str, tuple[type, ...]] = {
    "ncclGetErrorString": (_int,),
    "ncclGetLastError": (_communicator,),
}

NAMES = (*_PROTOTYPES, *_TEXTS)

Function = Callable[..., int]


class Functions:
    """The functions of one library, named without "nccl": `functions.all_reduce(...)` returns a `Result` as an int."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Looks up all functions in `library`.

        Raises:
            AttributeError: the library lacks one of the functions.
        """
        bound: dict[str, Function] = {}
        for name, arguments in _PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _int
            bound[name] = function
        for name, arguments in _TEXTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _text
        self._error_string: Callable[[int], bytes | None] = library.ncclGetErrorString
        self._last_error: Callable[[int | None], bytes | None] = library.ncclGetLastError
        self._get_version = bound["ncclGetVersion"]
        self._get_unique_id = bound["ncclGetUniqueId"]
        self.init_rank = bound["ncclCommInitRankConfig"]
        self.get_async_error = bound["ncclCommGetAsyncError"]
        self.count = bound["ncclCommCount"]
        self.user_rank = bound["ncclCommUserRank"]
        self.finalize = bound["ncclCommFinalize"]
        self.destroy = bound["ncclCommDestroy"]
        self.abort = bound["ncclCommAbort"]
        self.group_start = bound["ncclGroupStart"]
        self.group_end = bound["ncclGroupEnd"]
        self.all_reduce = bound["ncclAllReduce"]
        self.broadcast = bound["ncclBroadcast"]
        self.reduce = bound["ncclReduce"]
        self.all_gather = bound["ncclAllGather"]
        self.reduce_scatter = bound["ncclReduceScatter"]
        self.send = bound["ncclSend"]
        self.recv = bound["ncclRecv"]

    def version(self) -> int:
        """Returns the library's version as `nccl.h` encodes it: 22105 is 2.21.5."""
        number = _int()
        self._get_version(ctypes.byref(number))
        return number.value

    def new_id(self) -> bytes:
        """Returns an id for a new communicator.

        Raises:
            NcclError: NCCL cannot make one, for example because it finds no network interface to use.
        """
        made = UniqueId()
        result = self._get_unique_id(ctypes.byref(made))
        if result != Result.SUCCESS:
            raise NcclError(f"ncclGetUniqueId: {self.describe(result)}")
        return bytes(made.internal)

    def describe(self, result: int) -> str:
        """Returns the library's description of a result other than SUCCESS."""
        said = (self._error_string(result) or b"").decode(errors="replace")
        last = (self._last_error(None) or b"").decode(errors="replace").strip()
        return f"{said}: {last}" if last else said
