"""Measures how much a checkpoint slows down training, how fast it is written, and how much each rank reads.

    python bench/checkpoint.py [--ranks 2] [--gigabytes 1] [--rounds 9] [--steps 3] [--directory DIR]

"save" trains linear layers with AdamW. The parameters and the optimizer state occupy 1 GB in total. Each round runs a
few steps, saves, continues with steps (at least one) until the checkpoint is on disk, and then runs a few more steps.
The contestants are `paceline.save` (asynchronous and synchronous), torch's DCP (`async_save` and `save`) and
`torch.save` on rank 0. All of them call fsync, and their rounds alternate. "step s" is the mean duration of the steps
before and after the save. "lost s" is the total duration of the saving call and of the steps during the save, minus the
usual duration of that many steps. "call s" is the duration of the call, "durable s" the time until the checkpoint is on
disk, and "MB/s" the rate at which it was written. All figures are medians over the rounds. "no checkpoint" runs five
steps instead of a save; its "lost s" is the measurement error. "the disk alone" is an upper bound for the write rate:
every rank writes its share of the same number of zeros, bypassing the page cache, and calls fsync. The "asynchronous"
variant writes on a low-priority thread while the steps run; its "lost s" is the time by which the disk and its driver
delay training. In "load", 4 ranks save, and other numbers of ranks load. "read" is the total number of bytes read by
all ranks, divided by the number of bytes written.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import keep, parser, show
from torch import nn
from turns import leave_rows, rows_of_ranks

WIDTH = 2048
NO_SAVE_STEPS = 5
Save = Callable[[dict[str, Any], Path], Callable[[], bool]]  # the returned function checks for durability


def build(gigabytes: float) -> nn.Module:
    layers = max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def at_once() -> bool:
    return True


def ours(asynchronous: bool) -> Save:
    import paceline as dist

    def save(state: dict[str, Any], path: Path) -> Callable[[], bool]:
        handle = dist.save(state, path, asynchronous=asynchronous)
        return at_once if handle is None else handle.done

    return save


def dcps(asynchronous: bool) -> Save:
    import torch.distributed.checkpoint as dcp

    def save(state: dict[str, Any], path: Path) -> Callable[[], bool]:
        plain = {name: each.state_dict() for name, each in state.items()}
        if not asynchronous:
            dcp.save(plain, checkpoint_id=str(path))
            return at_once
        response: Any = dcp.async_save(plain, checkpoint_id=str(path))
        done: Callable[[], bool] = response.done
        return done

    return save


def torchs(state: dict[str, Any], path: Path) -> Callable[[], bool]:
    """Saves the whole state on rank 0 while the other ranks wait, as in PyTorch's tutorial."""
    import paceline as dist

    if dist.get_rank() == 0:
        path.mkdir()
        with open(path / "all.pt", "wb") as file:
            torch.save({name: each.state_dict() for name, each in state.items()}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()
    return at_once


def the_disk(nbytes: int, asynchronous: bool) -> Save:
    """Writes as many bytes as the state occupies, without a format or digests, bypassing the page cache."""
    import paceline as dist
    from paceline.train.elastic.process_priority import lower_thread_priority

    block = mmap.mmap(-1, 8 << 20)  # aligned to a page, as O_DIRECT requires
    block.write(bytes(len(block)))

    def write(path: Path) -> None:
        file = os.open(path / str(dist.get_rank()), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for _ in range(round(nbytes / dist.get_world_size() / len(block))):
            os.write(file, block)
        os.fsync(file)
        os.close(file)

    def write_modestly(path: Path) -> None:
        lower_thread_priority()
        write(path)

    def save(state: dict[str, Any], path: Path) -> Callable[[], bool]:
        path.mkdir(exist_ok=True)
        if not asynchronous:
            write(path)
            dist.barrier()
            return at_once
        thread = threading.Thread(target=write_modestly, args=(path,))
        thread.start()
        return lambda: not thread.is_alive()

    return save


def save_main(rank: int, gigabytes: float, rounds: int, steps: int, where: str, directory: str) -> None:
    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    store = Path(directory, "gloo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=dist.get_world_size()
    )
    torch.manual_seed(0)
    model = dist.DistributedDataParallel(build(gigabytes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    state = {"model": model, "optimizer": optimizer}
    nbytes = sum(each.nbytes for each in model.parameters()) * 3
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
    contestants: dict[str, Save | None] = {
        "no checkpoint": None,
        "paceline, asynchronous": ours(True),
        "DCP async_save": dcps(True),
        "paceline": ours(False),
        "DCP save": dcps(False),
        "torch.save on rank 0": torchs,
        "the disk alone, asynchronous": the_disk(nbytes, True),
        "the disk alone": the_disk(nbytes, False),
    }

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    measured: dict[str, list[Turn]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, save in contestants.items():
            path = Path(where, f"{name} {turn}".replace(" ", "_"))
            measured[name].append(run(step, steps, state, save, path))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                os.sync()
    rows = []
    for name, all_turns in measured.items():
        turns = all_turns[1:]  # the first turn allocates memory
        lost = [each.lost for each in turns]
        row: dict[str, object] = {"": name, "step s": statistics.median(each.step for each in turns)}
        row |= {"lost s": statistics.median(lost), "least": min(lost), "most": max(lost)}
        if contestants[name] is not None:
            call, durable = (statistics.median(getattr(each, of) for each in turns) for of in ("call", "durable"))
            row |= {"call s": call, "durable s": durable, "MB/s": nbytes / durable / 1e6}
        rows.append(row)
    torch.distributed.destroy_process_group()
    leave_rows(rows, directory)


class Turn(NamedTuple):
    """The slowest rank's times in a round, in seconds: step, lost time, call, and time until the save is on disk."""

    step: float
    lost: float
    call: float
    durable: float


def run(step: Callable[[], None], steps: int, state: dict[str, Any], save: Save | None, path: Path) -> Turn:
    import paceline as dist

    def timed() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    dist.barrier()
    undisturbed = [timed() for _ in range(steps)]
    began = time.perf_counter()
    is_durable = at_once if save is None else save(state, path)
    call = time.perf_counter() - began
    made = 0
    while True:
        step()
        made += 1
        all_done = torch.tensor(is_durable() and (save is not None or made == NO_SAVE_STEPS))
        dist.all_reduce(all_done, dist.ReduceOp.MIN)
        if all_done:
            break
    took = time.perf_counter() - began
    undisturbed += [timed() for _ in range(steps)]
    usual = statistics.fmean(undisturbed)  # the steps near a checkpoint may contain outliers too
    durable = 0.0
    if save is not None:
        durable = max(each.stat().st_mtime for each in path.rglob("*")) - (time.time() - time.perf_counter() + began)
    slowest = torch.tensor([usual, took - made * usual, call, durable], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Turn(*slowest.tolist())


def load_case(gigabytes: float, where: str) -> list[dict[str, object]]:
    path = str(Path(where, "four"))
    rows_of_ranks(save_of_four, 4, gigabytes, path)
    rows: list[dict[str, object]] = []
    for ranks in (2, 3, 8):
        rows += rows_of_ranks(load_main, ranks, gigabytes, path)
    shutil.rmtree(path)
    return rows


def parts(gigabytes: float) -> dict[str, Any]:
    import paceline as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(gigabytes)
    optimizer = dist.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-4)
    return {"model": model, "optimizer": optimizer}


def save_of_four(rank: int, gigabytes: float, path: str, directory: str) -> None:
    import paceline as dist

    dist.init_process_group()
    state = parts(gigabytes)
    state["model"](torch.randn(8, WIDTH)).square().mean().backward()
    state["optimizer"].step()
    dist.save(state, path)
    leave_rows([], directory)


def load_main(rank: int, gigabytes: float, path: str, directory: str) -> None:
    import paceline as dist
    from paceline.train.checkpoint.load import load_from
    from paceline.train.checkpoint.rank_channel import channel_of

    dist.init_process_group()
    state = parts(gigabytes)
    dist.barrier()
    began = time.perf_counter()
    (name,) = Path(path).glob("state_*")
    loaded = load_from(state, str(name), channel_of(None))
    took = time.perf_counter() - began
    counts = torch.tensor([loaded.nbytes_read], dtype=torch.float64)
    dist.all_reduce(counts)
    written = sum(each.stat().st_size for each in name.glob("*.safetensors"))
    row = {"ranks": f"4 -> {dist.get_world_size()}", "s": took, "read": counts.item() / written}
    leave_rows([row], directory)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--gigabytes", type=float, default=1.0)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument(
        "--steps", type=int, default=3, help="number of steps before a checkpoint, and again after it"
    )
    arguments.add_argument("--directory", help="directory for the checkpoints; by default a temporary directory")
    arguments.add_argument("--cases", nargs="+", default=["save", "load"], choices=["save", "load"])
    options = arguments.parse_args()
    tables: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as where:
        if "save" in options.cases:
            rows = rows_of_ranks(save_main, options.ranks, options.gigabytes, options.rounds, options.steps, where)
            title = f"Checkpoints of {options.gigabytes:g} GB on {options.ranks} ranks of one thread"
            tables.append({"title": title, "rows": rows})
        if "load" in options.cases:
            tables.append({"title": "loading", "rows": load_case(options.gigabytes / 4, where)})
    for each in tables:
        show(each["title"], each["rows"], None)
    if options.json:
        keep(tables, options.json)


if __name__ == "__main__":
    main()
