"""Measures the time from a rank's death to the other ranks' errors, and checks whether the errors identify that rank.

    python bench/death.py [--kills 200] [--case all_reduce ddp ...] [--busy 2] [--ballast 0] [--json FILE]

Four ranks run on two cores, alongside busy processes. While they are communicating, one of them is killed with SIGKILL;
the time is measured from the kill to the error raised in each survivor's program. If a survivor was not in a call at
the time of the kill, the time is measured from the survivor's next call. The case `late` is different: three ranks wait
in init_process_group for the fourth, and one of the three is killed. The same run also measures torch's gloo with the
same all-reduce.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from hosts.network import Network, ipv4
from report import parser, show
from world import Place, World, free_port, places

RANKS = 4
CORES = 2
TIMEOUT_S = 5  # timeout of each call; a survivor that times out did not detect the death
ELEMENTS = 25_000
GROUPS = 9
WORKS = 8  # concurrent asynchronous calls in `works`
_LATE = 1  # the rank that does not join in `late`
_ENTERED = struct.Struct("q")


@dataclass(frozen=True)
class Raised:
    """The error that a survivor raised after the death; times are in ns on the machine's monotonic clock."""

    entered: int
    at: int
    named: bool


class Board:
    """Shared counters of the calls that each rank has entered. The process that kills a rank reads the counters."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), RANKS * _ENTERED.size)

    def enter(self, rank: int) -> None:
        _ENTERED.pack_into(self._memory, rank * _ENTERED.size, self.entered(rank) + 1)

    def entered(self, rank: int) -> int:
        return _ENTERED.unpack_from(self._memory, rank * _ENTERED.size)[0]


def _group_calls() -> dict[str, Callable[[], Callable[[], object]]]:
    """Returns, for each case, a function that prepares the tensors and returns the call to repeat."""
    import torch

    import paceline as dist

    def all_reduce() -> Callable[[], object]:
        tensor = torch.zeros(ELEMENTS)
        return lambda: dist.all_reduce(tensor)

    def asynchronous() -> Callable[[], object]:
        tensor = torch.zeros(ELEMENTS)
        return lambda: dist.all_reduce(tensor, async_op=True).wait()

    def works() -> Callable[[], object]:
        tensors = [torch.zeros(ELEMENTS) for _ in range(WORKS)]
        return lambda: [work.wait() for work in [dist.all_reduce(each, async_op=True) for each in tensors]]

    def futures() -> Callable[[], object]:
        tensor = torch.zeros(ELEMENTS)
        return lambda: dist.all_reduce(tensor, async_op=True).get_future().wait()

    def messages() -> Callable[[], object]:
        sent, received = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
        after, before = (dist.get_rank() + 1) % RANKS, (dist.get_rank() - 1) % RANKS
        return lambda: [work.wait() for work in (dist.isend(sent, after), dist.irecv(received, before))]

    def ddp() -> Callable[[], object]:
        model = dist.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 8)))
        batch = torch.ones(4, 128)
        return lambda: model(batch).sum().backward()

    def groups() -> Callable[[], object]:
        tensor = torch.zeros(ELEMENTS)
        made = [dist.new_group() for _ in range(GROUPS)]
        turn = iter(range(1 << 60))
        return lambda: dist.all_reduce(tensor, group=made[next(turn) % GROUPS])

    return {
        "all_reduce": all_reduce,
        "ddp": ddp,
        "asynchronous": asynchronous,
        "works": works,
        "futures": futures,
        "messages": messages,
        "groups": groups,
        "hosts": all_reduce,
    }


def work(case: str, victim: int, ballast_mib: int, board_path: str) -> Raised | None:
    """The program of a rank in most cases: communicates until an error is raised."""
    import torch

    import paceline as dist

    board, rank = Board(board_path), int(os.environ["RANK"])
    ballast = torch.ones(ballast_mib << 18)
    warnings.filterwarnings("ignore", message=".* slow each other down")  # busy processes are intended here
    dist.init_process_group(timeout=timedelta(seconds=TIMEOUT_S))
    call = _group_calls()[case]()
    entered = 0
    try:
        while True:
            entered = time.monotonic_ns()
            board.enter(rank)
            call()
    except dist.CollectiveError as error:
        at = time.monotonic_ns()
        del ballast
        # This rank must not exit yet, because the other ranks could report it as the dead rank. A real program would
        # clean up first.
        return Raised(entered, at, isinstance(error, dist.PeerLostError) and error.rank == victim)


def wait_for_the_late(victim: int, board_path: str) -> Raised | None:
    """The program of a rank in the case `late`."""
    import paceline as dist

    board, rank = Board(board_path), int(os.environ["RANK"])
    if rank == _LATE:
        board.enter(rank)
        time.sleep(60)  # until the parent process closes the world
        return None
    entered = time.monotonic_ns()
    board.enter(rank)
    try:
        dist.init_process_group(
            init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    except (RuntimeError, OSError) as error:
        return Raised(entered, time.monotonic_ns(), f"rank {victim} (" in str(error) and "died" in str(error))
    return None


def gloo(board_path: str) -> Raised | None:
    """The program of a rank that uses torch's gloo. gloo's errors do not identify the dead rank."""
    import torch
    import torch.distributed as dist

    board, rank = Board(board_path), int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    tensor = torch.zeros(ELEMENTS)
    entered = 0
    try:
        while True:
            entered = time.monotonic_ns()
            board.enter(rank)
            dist.all_reduce(tensor)
    except RuntimeError:
        return Raised(entered, time.monotonic_ns(), False)


@dataclass
class Tally:
    """Statistics about the errors that the survivors raised in a case."""

    times_ms: list[float] = field(default_factory=list)
    named: int = 0

    def add(self, killed_ns: int, told: Raised) -> None:
        self.times_ms.append((told.at - max(killed_ns, told.entered)) / 1e6)
        self.named += told.named

    def row(self, case: str, kills: int) -> dict[str, object]:
        cuts = statistics.quantiles(self.times_ms, n=100, method="inclusive")
        return {
            "case": case,
            "kills": kills,
            "survivors": len(self.times_ms),
            "p50 ms": cuts[49],
            "p95 ms": cuts[94],
            "p99 ms": cuts[98],
            "max ms": max(self.times_ms),
            "named the victim": "-" if case == "gloo" else f"{self.named} of {len(self.times_ms)}",
        }


def kill_one(case: str, where: list[Place], address: str, port: int, ballast_mib: int, tally: Tally) -> None:
    """Forms a world, kills one rank, and collects the other ranks' errors."""
    late = case == "late"
    victim = 2 if late else random.randrange(RANKS)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(RANKS * _ENTERED.size)
        board = Board(file.name)
        if late:
            world = World(where, (address, port), wait_for_the_late, (victim, file.name))
        elif case == "gloo":
            world = World(where, (address, port), gloo, (file.name,))
        else:
            world = World(where, (address, port), work, (case, victim, ballast_mib, file.name))
        with world:
            calls = 1 if late else 2 * GROUPS
            deadline = time.monotonic() + 60
            while min(map(board.entered, range(RANKS))) < calls:
                time.sleep(0.005)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{case}: the ranks did not meet")
            time.sleep((0.5 if late else 0.02) + random.random() / 50)
            killed_ns = time.monotonic_ns()
            world.kill(victim)
            absent = {victim, _LATE} if late else {victim}
            for told in world.join(30, expect_dead=absent):
                if isinstance(told, Raised):
                    tally.add(killed_ns, told)


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Runs processes that compute continuously while the context is active."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(case: str, kills: int, ballast_mib: int) -> dict[str, object]:
    """Runs a case, and returns its row of the table."""
    tally = Tally()
    if case == "hosts":
        network = Network(2, 1, 1500, None, None)
        with contextlib.closing(network):
            where = places([RANKS // 2] * 2, network.hosts)
            for _ in range(kills):
                port = network.inside[0].run(free_port, ipv4(0))
                kill_one(case, where, ipv4(0), port, ballast_mib, tally)
    else:
        for _ in range(kills):
            kill_one(case, places([RANKS], [None]), "127.0.0.1", free_port("127.0.0.1"), ballast_mib, tally)
    return tally.row(case, kills)


CASES = ("all_reduce", "ddp", "asynchronous", "works", "futures", "messages", "groups", "hosts", "late", "gloo")


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--kills", type=int, default=200)
    arguments.add_argument("--case", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=", ".join(CASES))
    arguments.add_argument("--busy", type=int, default=2, help="number of busy processes that run alongside the ranks")
    arguments.add_argument(
        "--ballast", type=int, default=0, metavar="MIB", help="memory that each rank allocates and writes to"
    )
    options = arguments.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    rows: list[dict[str, object]] = []
    with busy(options.busy):
        for case in options.case:
            rows.append(measure(case, options.kills, options.ballast))
            print(rows[-1], file=sys.stderr)
    show(
        f"from SIGKILL to the error in each survivor, {RANKS} ranks on {CORES} cores, {options.busy} busy processes, "
        f"{options.ballast} MiB a rank",
        rows,
        options.json,
    )


if __name__ == "__main__":
    main()
