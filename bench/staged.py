"""Compares the duration of an all-reduce of CUDA tensors through host memory with that of torch's gloo.

    python bench/staged.py [--ranks 2] [--rounds 10] [--json FILE]

The ranks share the available GPUs. The contestants alternate in the same processes, and a turn ends when the GPU has
the results. `paceline` is a synchronous call with backend="paceline". `host` is the time until such a call with
`async_op=True` returns. gloo is measured in two ways: torch.distributed's all-reduce of the CUDA tensor, and a copy to
pinned memory, an all-reduce there and a copy back. The ratio is a contestant's median divided by Paceline's.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from report import compared, human, in_turns, parser, show, spread

SIZES = [4, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]


def calls_for(nbytes: int) -> int:
    return max(1, min(20, (64 << 20) // max(nbytes, 1 << 20)))


def rank_main(rank: int, ranks: int, rounds: int, directory: str) -> None:
    import time

    import torch.distributed as gloo

    import paceline as dist

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("paceline")
    gloo.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=ranks)
    results = {}
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4, device=device)
        pinned = torch.zeros(nbytes // 4, pin_memory=True)
        returned: list[float] = []

        def staged(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)
            torch.cuda.synchronize()

        def asynchronous(tensor: torch.Tensor = tensor, returned: list[float] = returned) -> None:
            started = time.perf_counter()
            work = dist.all_reduce(tensor, async_op=True)
            returned.append(time.perf_counter() - started)
            assert work is not None
            work.wait()
            torch.cuda.synchronize()

        def of_torch(tensor: torch.Tensor = tensor) -> None:
            gloo.all_reduce(tensor)
            torch.cuda.synchronize()

        def by_hand(tensor: torch.Tensor = tensor, pinned: torch.Tensor = pinned) -> None:
            pinned.copy_(tensor)
            gloo.all_reduce(pinned)
            tensor.copy_(pinned)
            torch.cuda.synchronize()

        contestants = {"paceline": staged, "host": asynchronous, "gloo": of_torch, "gloo, pinned": by_hand}
        calls = dict.fromkeys(contestants, calls_for(nbytes))
        for call in contestants.values():
            call()
        returned.clear()
        times = in_turns(contestants, calls, rounds, dist.barrier)
        results[nbytes] = {**times, "host": returned}
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "times": results}))
    dist.barrier()
    gloo.destroy_process_group()


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=10)
    options = arguments.parse_args()
    if torch.cuda.device_count() == 0:
        print("bench/staged.py measures calls of CUDA tensors, and torch sees no GPU here; nothing was measured")
        return
    import paceline as dist

    with tempfile.TemporaryDirectory() as directory:
        dist.spawn(rank_main, (options.ranks, options.rounds, directory), options.ranks)
        result = json.loads(Path(directory, "result.json").read_text())
    rows: list[dict[str, object]] = []
    for nbytes in SIZES:
        times = result["times"][str(nbytes)]
        spreads = {name: spread(each, 1 if name == "host" else calls_for(nbytes)) for name, each in times.items()}
        rows += [{"size": human(nbytes), **row} for row in compared(spreads, "paceline")]
    gpus = min(options.ranks, torch.cuda.device_count())
    show(f"all_reduce of float32 by {options.ranks} ranks on {gpus} x {result['gpu']}", rows, options.json)


if __name__ == "__main__":
    main()
