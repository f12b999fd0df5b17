"""The C++ core. Codes (operation, dtype, reduce op, status) are the enum values of `native/`."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from paceline.comm.engine.channel import CollectiveCall

def usable_cores() -> int:
    """Returns the number of cores that this process may use given its affinity and its cgroup's quota; at least 1."""

def cpu_quota(root: str = "") -> tuple[float, int]:
    """Returns the CPU quota of this process's cgroup, in cores (0: no limit), and a number that identifies the cgroup.

    `root` is the prefix of /proc and /sys.
    """

def cgroups(controller: str, root: str = "") -> tuple[list[str], bool]:
    """Returns the directories of this process's cgroup and its ancestors for a controller, innermost first, and a flag.

    If `controller` is empty, these are the directories of cgroup version 2. The flag is True if the mount table lists
    the directories. If it is False, the result consists of the usual directories and may be incomplete.
    """

def domain(root: str = "") -> tuple[int, int]:
    """Returns the NUMA node and the L3 cache that all cores of this process share; -1 if there is none."""

class Outcome:
    """The reason why a collective call failed."""

    code: int
    missing: list[int]
    has_begun: bool
    waiting: list[int]
    blocked_by: list[int]
    gone: list[int]
    left: list[int]
    cause: int
    cause_left: bool
    cause_hung: bool
    reporter: int
    waited_ns: int
    split_from: int
    split_to: int
    split_sent: int
    split_expected: int
    step: int
    calls: list[tuple[int, int, int, int, int, int]]
    algorithms: list[int]

class Work:
    def done(self) -> bool: ...
    def wait(self, timeout_ns: int) -> bool: ...
    def outcome(self) -> Outcome | None: ...

def completion_count() -> int:
    """Returns the number of asynchronous calls that have completed in this process, modulo 2^32."""

def announce_completion() -> None:
    """Wakes the threads that are waiting in `await_completion`."""

def await_completion(seen: int, timeout_ns: int) -> None:
    """Sleeps without holding the interpreter lock while `completion_count()` equals `seen`; may return early."""

def create_directory(size: int) -> int:
    """Creates the shared memory in which a host's ranks register; the caller must close the returned descriptor."""

class HostMesh:
    """The ranks on this host, numbered as in the host directory."""

    @staticmethod
    def join(rank: int, size: int, directory: int = -1, global_ranks: Sequence[int] = ()) -> HostMesh:
        """Registers this rank in the directory given by a descriptor, or in a new one; see native/shm/host_mesh.hpp."""

    def absent(self, timeout_s: float) -> list[int]:
        """Waits up to `timeout_s` for all ranks to appear; returns those that have not."""

    def lost(self) -> list[int]:
        """Returns the ranks that have died."""

    def close(self) -> None: ...

def wire_levels() -> list[str]:
    """Returns the SIMD levels that this machine supports, slowest first."""

def packed_size(wire: int, count: int) -> int: ...
def pack(wire: int, level: str, dtype: int, tensor: int, residual: int, packed: int, count: int) -> None:
    """Packs `count` elements at the address `tensor`; see native/wire/wire.hpp. If `residual` is 0, there is none."""

def unpack(wire: int, level: str, dtype: int, packed: int, tensor: int, count: int) -> None: ...
def add_packed(wire: int, level: str, dtype: int, packed: int, tensor: int, count: int, divisor: int) -> None: ...

class PreparedCall:
    """A collective call that is prepared once and executed many times on the same memory.

    Both methods raise a ValueError if another thread is executing the same call or the group is closed.
    """

    def run(self, timeout_ns: int, /) -> Outcome | None: ...
    def submit(self, timeout_ns: int, /) -> Work: ...

class HasTimeout(Protocol):
    @property
    def timeout_ns(self) -> int: ...

def read_tensors(
    tensor: type[object],
    parameter: type[object],
    reduce_op: type[object],
    count_writes: Callable[[tuple[torch.Tensor, ...]], None],
) -> None:
    """Makes the core read tensors of these classes directly, if PyTorch permits it; see native/bindings/tensors.hpp.

    `count_writes` is called with the tensors that the core writes to.
    """

class FastPathCall:
    """The fast path of a persistent call; see native/bindings/fast_path_call.hpp."""

    is_started: bool

    def __call__(self) -> None: ...
    def arm(
        self,
        prepared: PreparedCall,
        tensors: Sequence[tuple[torch.Tensor, tuple[object, ...]]],
        layout_of: Callable[[torch.Tensor], tuple[object, ...]],
        limits: HasTimeout,
        watched: dict[str, object],
        key: str,
        count_writes: Callable[[tuple[torch.Tensor, ...]], None],
        written: tuple[torch.Tensor, ...],
        /,
    ) -> None: ...

class HostGroup:
    @property
    def quantizes(self) -> bool: ...
    @staticmethod
    def create(
        mesh: HostMesh, members: Sequence[int], id: int, slot_bytes: int, timeout_s: float, threads: int
    ) -> HostGroup | None: ...
    def all_reduce(
        self, address: int, count: int, dtype: int, reduce_op: int, timeout_ns: int, /
    ) -> Outcome | None: ...
    def all_reduce_tensor(self, tensor: object, op: object, timeout_ns: int, /) -> Outcome | Literal[False] | None: ...
    def broadcast(self, address: int, count: int, dtype: int, root: int, timeout_ns: int, /) -> Outcome | None: ...
    def run_equal(
        self,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        /,
    ) -> Outcome | None: ...
    def run(self, call: CollectiveCall, /) -> Outcome | None: ...
    def submit(self, call: CollectiveCall, /) -> Work: ...
    def prepare(self, call: CollectiveCall, /) -> PreparedCall: ...
    def record_as(self, group: int, /) -> None: ...
    def abort(self) -> None: ...
    def failure(self) -> int: ...
    def close(self) -> None: ...

class UpdateOptions:
    """The options of a parameter group in one step."""

def adam_options(
    *, lr: float, weight_decay: float, maximize: bool, beta1: float, beta2: float, eps: float, is_decoupled: bool
) -> UpdateOptions: ...
def sgd_options(
    *, lr: float, weight_decay: float, maximize: bool, momentum: float, dampening: float, nesterov: bool
) -> UpdateOptions: ...

class Update:
    """An optimizer update, applied to runs of elements from front to back; see native/update/update.hpp.

    A run consists of the addresses of its elements, its two states and its step count (0 if there is none), followed by
    its size in bytes and the index of its parameter group.
    """

    def __init__(self, dtype: int, runs: Sequence[tuple[int, int, int, int, int, int]]) -> None: ...
    def begin(self, groups: Sequence[UpdateOptions]) -> None: ...
    def apply(self, averages: int, nbytes: int) -> None: ...

class SharedMemory:
    """Memory mapped by the ranks on a host; it is freed when no rank holds the object or one of its tensors."""

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Returns `nbytes` bytes starting at `offset` as a one-dimensional uint8 tensor with its own storage."""

def share_memory(mesh: HostMesh, nbytes: int) -> tuple[SharedMemory, int]:
    """Creates zeroed memory for the ranks of the mesh; returns it and its id."""

def find_memory(mesh: HostMesh, owner: int, id: int, nbytes: int, timeout_s: float) -> SharedMemory | None:
    """Returns the memory created by mesh rank `owner`, or None on timeout or if the owner has left."""

def withdraw_memory(mesh: HostMesh, id: int) -> None:
    """Withdraws the memory from the mesh; to be called after the other ranks have found it."""

def shared_tensor(nbytes: int) -> torch.Tensor: ...
def simd_level() -> str: ...
def reduce(out: int, sources: Sequence[int], count: int, dtype: int, reduce_op: int, divisor: int) -> None: ...
def reduces(dtype: int, reduce_op: int, /) -> bool: ...
def first_not_finite(ranges: Sequence[int], dtype: int, max_bytes: int) -> int:
    """Returns the index of the first range that contains NaN or infinity in its first `max_bytes` bytes, or -1."""

class TlsIdentity:
    """The certificate of a job, derived from 32 secret bytes."""

    def __init__(self, seed: bytes) -> None: ...

class TlsConnection:
    """A TLS connection over a socket. Python must close it unless the core takes it over."""

    def __init__(self, identity: TlsIdentity, socket: int, accepts: bool) -> None: ...
    def handshake(self, timeout_s: float) -> str: ...
    def send(self, data: bytes, timeout_s: float) -> None: ...
    def receive(self, max_bytes: int, timeout_s: float) -> bytes: ...

class StoreTable:
    def apply(self, op: int, number: int, fields: Sequence[bytes]) -> tuple[int, int, list[bytes]] | None: ...
    def missing(self, op: int, keys: Sequence[bytes]) -> list[bytes]: ...

class StoreServer:
    def __init__(self, listener: int = -1) -> None: ...
    def adopt(self, connection: int | TlsConnection) -> None: ...
    def close(self) -> None: ...

class StoreClient:
    def __init__(self, connection: int | TlsConnection) -> None: ...
    def call(
        self, op: int, number: int, fields: Sequence[bytes], timeout_s: float
    ) -> tuple[int, int, int, list[bytes]]: ...
    def close(self) -> None: ...

class Schedule:
    @staticmethod
    def make(algorithm: int, blocks: int, rank: int, size: int, steps: bytes, wire: int = 0) -> Schedule: ...

def simulate(
    schedules: Sequence[Schedule],
    arrivals: bytes,
    speeds: bytes,
    routes: bytes,
    capacities: bytes,
    block_nbytes: float,
    gamma_s_per_byte: float,
    piece_nbytes: float,
    records: bool,
) -> tuple[list[float], list[float], list[tuple[int, int, float, float, float]]]:
    """Returns the end time of each schedule, the bytes per link, and a (route, step, bytes, begin, end) per transfer.

    All arguments of type `bytes` contain doubles. A route begins with eight of them: the index of the source in
    `schedules`, the number by which the source refers to its peer, the same two numbers for the target, the latency,
    the overhead, the limit in bytes per second, and the number of links that the route uses. The index and the weight
    of each of these links follow.
    """

class Message:
    """A send or a receive in progress."""

    def done(self) -> bool: ...
    def wait(self, timeout_ns: int) -> bool: ...
    def outcome(self) -> Outcome | None: ...
    def source(self) -> int: ...

class ScheduleGroup:
    @staticmethod
    def create(
        mesh: HostMesh,
        id: int,
        rank: int,
        mesh_ranks: Sequence[int],
        connections: Sequence[Sequence[int | TlsConnection]],
        timeout_s: float,
        global_ranks: Sequence[int] = (),
    ) -> ScheduleGroup | None: ...
    def run(self, schedule: Schedule, call: CollectiveCall, predicted_ns: int = 0) -> Outcome | None: ...
    def submit(self, schedule: Schedule, call: CollectiveCall, predicted_ns: int = 0) -> Work: ...
    def prepare(self, schedule: Schedule, call: CollectiveCall, predicted_ns: int = 0) -> PreparedCall: ...
    def prediction_miss(self) -> tuple[int, int, int, int, int, int, int] | None: ...
    def send(
        self, peer: int, tag: int, dtype: int, tensor: Sequence[int], timeout_ns: int, background: bool, /
    ) -> Message: ...
    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Sequence[int], timeout_ns: int, background: bool, /
    ) -> Message: ...
    def gone(self) -> list[int]: ...
    def record_as(self, group: int, /) -> None: ...
    def record_messages_as(self, group: int, /) -> None: ...
    def abort(self) -> None: ...
    def failure(self) -> int: ...
    def close(self) -> None: ...

def time_reduction(nbytes: int) -> float: ...

RECORDING_NBYTES: int

def set_user_file_namer(name_of: Callable[[str], str | None]) -> None:
    """Sets the function that returns the name to record for a source file, or None if the file is not the user's.

    Until this function is set, the source lines of calls are not recorded.
    """

class RecordedCall:
    """The record of a call in an engine outside the core, from its creation until `end`."""

    def __init__(
        self,
        group: int,
        operation: int,
        dtype: int,
        reduce_op: int,
        sequence: int,
        count: int,
        root: int,
        is_async: bool,
        tag: int,
        /,
    ) -> None: ...
    def start(self, tick: int = 0) -> None: ...
    def end(
        self, outcome: int, shm_nbytes: int = 0, tcp_nbytes: int = 0, last_arrived: int = -1, tick: int = 0
    ) -> None: ...

def begin_recording(fd: int, worker: str, host: str, boot: str, time_namespace: int) -> bool:
    """Begins recording to the file `fd`, or to memory if `fd` is -1; returns False if another process uses the file."""

def is_recording() -> bool: ...
def pause_recording(is_paused: bool, /) -> None:
    """Pauses or resumes recording, for benchmarks."""

def identify_recording(rank: int, world_size: int, /) -> None: ...
def finish_recording() -> None: ...
def record_name(text: str, /) -> int: ...
def record_step(step: int, /) -> None: ...
def record_group(name: str, engine: str, identity: int, rank: int, members: Sequence[int], /) -> int: ...
def record_group_closed(serial: int, /) -> None: ...
def record_begin(kind: int, name: int, first: int, second: int, /) -> int:
    """Records the beginning of an event; returns the stamp to pass to `record_end`, or 0 if nothing is recorded."""

def record_end(stamp: int, /) -> None: ...
def record_begin_at(kind: int, name: int, first: int, second: int, tick: int, /) -> int: ...
def record_end_at(stamp: int, tick: int, /) -> None: ...
def record_tick_at(monotonic_ns: int, /) -> int:
    """Returns the tick that corresponds to a time on CLOCK_MONOTONIC, or 0 if recording is disabled."""

def record_end_with(stamp: int, first: int, second: int, /) -> None: ...
def record_sent(stamp: int, /) -> None: ...
def record_mark(kind: int, name: int, first: int, second: int, /) -> None: ...
def record_span(kind: int, name: int, start: int, first: int, second: int, /) -> None:
    """Records an event that began at the tick `start` and ends now."""

def record_value(name: int, value: float, /) -> None: ...
def record_ticks() -> int: ...
def snapshot_recording(fd: int, /) -> bytes:
    """Returns a copy of a recording that is being written; empty if no process has begun recording to `fd`."""
