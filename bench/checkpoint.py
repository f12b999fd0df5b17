"""What does a training lose by a checkpoint, how fast is it written, and how much does each rank read?

    python bench/checkpoint.py [--ranks 2] [--gigabytes 1] [--rounds 5] [--steps 16] [--directory DIR]

"save": a training of linear layers with AdamW, whose parameters and optimizer's state are 1 GB, makes some steps
without a checkpoint, and the same steps with one after the first: with `paceline.save` (asynchronous and not), with
torch's DCP (`async_save` and `save`) and with `torch.save` on rank 0. All of them call fsync, and they take turns.
"lost s" is by how much longer the steps took, "call s" how long the call that saves took, "durable s" the time until
the checkpoint is on the disk, and "MB/s" what was written in that time; the medians of all rounds. "the disk alone" is
the bound: every rank writes its share of as many zeros past the page cache, and calls fsync.
"load": 4 ranks save, and other numbers of ranks load; "read" is what all ranks together read, as a share of what was
written.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import keep, parser, show
from torch import nn
from turns import leave_rows, rows_of_ranks

WIDTH = 2048
Save = Callable[[dict[str, Any], Path], Callable[[], object]]  # returns what waits until the checkpoint is durable


def build(gigabytes: float) -> nn.Module:
    layers = max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def ours(asynchronous: bool) -> Save:
    import paceline as dist

    def save(state: dict[str, Any], path: Path) -> Callable[[], object]:
        handle = dist.save(state, path, asynchronous=asynchronous)
        return (lambda: None) if handle is None else handle.wait

    return save


def dcps(asynchronous: bool) -> Save:
    import torch.distributed.checkpoint as dcp

    def save(state: dict[str, Any], path: Path) -> Callable[[], object]:
        plain = {name: each.state_dict() for name, each in state.items()}
        if not asynchronous:
            dcp.save(plain, checkpoint_id=str(path))
            return lambda: None
        response: Any = dcp.async_save(plain, checkpoint_id=str(path))
        return response.result

    return save


def torchs(state: dict[str, Any], path: Path) -> Callable[[], object]:
    """Rank 0 saves all, and the others wait, as the tutorial has it."""
    import paceline as dist

    if dist.get_rank() == 0:
        path.mkdir()
        with open(path / "all.pt", "wb") as file:
            torch.save({name: each.state_dict() for name, each in state.items()}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()
    return lambda: None


def the_disk(nbytes: int) -> Save:
    """Writes as many bytes as the state has, without a format, a digest or a copy in the page cache."""
    import paceline as dist

    block = mmap.mmap(-1, 8 << 20)  # aligned to a page, as O_DIRECT demands
    block.write(bytes(len(block)))

    def save(state: dict[str, Any], path: Path) -> Callable[[], object]:
        path.mkdir(exist_ok=True)
        file = os.open(path / str(dist.get_rank()), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for _ in range(round(nbytes / dist.get_world_size() / len(block))):
            os.write(file, block)
        os.fsync(file)
        os.close(file)
        dist.barrier()
        return lambda: None

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
        "the disk alone": the_disk(nbytes),
    }

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, save in contestants.items():
            path = Path(where, f"{name} {turn}".replace(" ", "_"))
            measured[name].append(run(step, steps, state, save, path))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                os.sync()
    without = [total for total, _, _ in measured["no checkpoint"][1:]]
    rows = []
    for name, all_turns in measured.items():
        turns = all_turns[1:]  # the first one allocates memory
        lost = statistics.median(turn[0] - base for turn, base in zip(turns, without, strict=True))
        call, durable = (statistics.median(turn[at] for turn in turns) for at in (1, 2))
        row: dict[str, object] = {"": name, "steps s": statistics.median(turn[0] for turn in turns)}
        if contestants[name] is not None:
            spread = [turn[0] - base for turn, base in zip(turns, without, strict=True)]
            row |= {"lost s": lost, "least": min(spread), "most": max(spread)}
            row |= {"call s": call, "durable s": durable, "MB/s": nbytes / durable / 1e6}
        rows.append(row)
    torch.distributed.destroy_process_group()
    leave_rows(rows, directory)


def run(
    step: Callable[[], None], steps: int, state: dict[str, Any], save: Save | None, path: Path
) -> tuple[float, float, float]:
    """The seconds of all steps, of the call that saves, and until the checkpoint is durable; of the slowest rank."""
    import paceline as dist

    dist.barrier()
    started = time.perf_counter()
    call = durable = 0.0
    finish: Callable[[], object] | None = None
    step()
    if save is not None:
        began = time.perf_counter()
        finish = save(state, path)
        call = time.perf_counter() - began
    for _ in range(steps - 1):
        step()
    if finish is not None:
        finish()
    total = time.perf_counter() - started
    if save is not None:
        durable = max(each.stat().st_mtime for each in path.rglob("*")) - (time.time() - time.perf_counter() + began)
    slowest = torch.tensor([total, call, durable], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    first, second, third = slowest.tolist()
    return first, second, third


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
    from paceline.checkpoint.loading import load_from
    from paceline.checkpoint.talking import talk_of

    dist.init_process_group()
    state = parts(gigabytes)
    dist.barrier()
    began = time.perf_counter()
    (name,) = Path(path).glob("state_*")
    loaded = load_from(state, str(name), talk_of(None))
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
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=16, help="of each turn; a checkpoint should end within them")
    arguments.add_argument("--directory", help="where checkpoints are written; a temporary directory by default")
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
