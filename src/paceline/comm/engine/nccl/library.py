"""Finds the NCCL library at run time: the one that torch has loaded, NVIDIA's wheel, or the system's.

Declares NCCL's C functions for ctypes: prototypes, structures and result codes.

The numbers are those of `nccl.h`, which never changes existing ones. Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

UNIQUE_ID_BYTES = 128
_UNDEFINED = -(1 << 31)
_CONFIG_MAGIC = 0xCAFEBEEF
# The version of the structure below, not of the library: newer libraries take further fields from their own defaults.
_CONFIG_VERSION = 21400


class NcclResult(IntEnum):
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
        if result != NcclResult.SUCCESS:
            raise NcclError(f"ncclGetUniqueId: {self.describe(result)}")
        return bytes(made.internal)

    def describe(self, result: int) -> str:
        """Returns the library's description of a result other than SUCCESS."""
        said = (self._error_string(result) or b"").decode(errors="replace")
        last = (self._last_error(None) or b"").decode(errors="replace").strip()
        return f"{said}: {last}" if last else said


LIBRARY_VARIABLE = "PACELINE_NCCL_LIBRARY"
OLDEST = 21400
_NAME = "libnccl.so"
_SONAME = "libnccl.so.2"
_INSTALL = "install torch with CUDA, which brings it, or the package nvidia-nccl-cu12 (or -cu13, as torch.version.cuda)"


class LibraryMissingError(Exception):
    """There is no usable NCCL library; the message says what was found and what to do."""


@dataclass(frozen=True)
class Library:
    """A loaded library: its path, its version as `nccl.h` encodes it, and its functions."""

    path: str
    version: int
    functions: Functions


def format_version(code: int) -> str:
    """Returns a version code as text: 22105 as "2.21.5". Codes before 2.9 have one digit less.

    >>> format_version(22105), format_version(2708)
    ('2.21.5', '2.7.8')
    """
    major = 10000 if code >= 10000 else 1000
    return f"{code // major}.{code % major // 100}.{code % 100}"


def load(path: str) -> Library:
    """Loads the library at `path`.

    Raises:
        LibraryMissingError: the file cannot be loaded, is not NCCL, or is too old.
    """
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise LibraryMissingError(f"the NCCL library {path} cannot be loaded ({error}); {_INSTALL}") from error
    old = f"older than {format_version(OLDEST)}, the first whose communicators start without blocking"
    fix = f"so that a missing rank ends in an error and not in a hang; {_INSTALL}, or name a newer one in {LIBRARY_VARIABLE}"
    try:
        functions = Functions(loaded)
    except AttributeError as error:
        raise LibraryMissingError(f"{path} is no NCCL library, or one {old}, {fix} ({error})") from error
    version = functions.version()
    if version < OLDEST:
        raise LibraryMissingError(f"{path} is NCCL {format_version(version)}, {old}, {fix}")
    return Library(path, version, functions)


@functools.cache
def find() -> Library:
    """Returns the library of this process: the one that PACELINE_NCCL_LIBRARY names, or else the first one found.

    The search looks for a library that is loaded already (by torch), then in NVIDIA's wheel, then in the system.

    Raises:
        LibraryMissingError: there is no library, or the first one found is too old.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        try:
            return load(named)
        except LibraryMissingError as error:
            raise LibraryMissingError(f"{error}. {LIBRARY_VARIABLE} names it") from error
    for path in _candidates():
        return load(path)
    raise LibraryMissingError(
        f"no NCCL library ({_SONAME}) is loaded, in the wheel nvidia-nccl, or known to the system; {_INSTALL}, or name "
        f"it in {LIBRARY_VARIABLE}"
    )


def _candidates() -> Iterator[str]:
    yield from _loaded()
    yield from _of_wheel()
    system = ctypes.util.find_library("nccl")
    if system is not None:
        yield system


def _loaded() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if Path(path[2]).name.startswith(_NAME):
            yield "/" + path[2]


def _of_wheel() -> Iterator[str]:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "lib" / _SONAME
        if path.exists():
            yield str(path)
