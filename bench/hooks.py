"""Measures the processor time per parameter that data parallelism adds to the training thread of a single rank.

    python bench/hooks.py [--rounds 100] [--json FILE]

The script measures the processor time of the training thread in the forward and backward pass of 200 layers of 16 x 16
with a bias, subtracts that of the bare model, and divides the difference by the 400 parameters. This includes running
hooks, detecting full buckets, checking gradients, passing buckets to the progress thread, and waiting for it at the
end, but not the progress thread's own work. One rank with one thread alternates between the variants for n rounds; the
lowest time is reported. p50 and p95 are computed over the rounds, minus the bare model's median. "empty hooks" is
torch's part: hooks that do nothing. "launches" is the number of buckets that are passed on during the backward pass;
"us a launch" is the cost of each bucket after the first, regardless of its size. Most of this cost is the wake-up of
the progress thread.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from report import p95, parser, show
from torch import nn

LAYERS, WIDTH = 200, 16
OVERLAPPED = {"overlapped, one bucket": 0.2, "overlapped, 24 a bucket": 0.0131, "overlapped, each a bucket": 1e-6}


def rank_main(rank: int, rounds: int, directory: str) -> None:
    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    bare = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    empty = copy.deepcopy(bare)
    for param in empty.parameters():
        param.register_post_accumulate_grad_hook(lambda _: None)
    wrap = dist.DistributedDataParallel
    models = {"bare": bare, "empty hooks": empty, "at the end": wrap(copy.deepcopy(bare), overlap=False)}
    for name, cap_mb in OVERLAPPED.items():
        models[name] = wrap(copy.deepcopy(bare), bucket_cap_mb=cap_mb, overlap=True)
    x = torch.ones(2, WIDTH)
    times_s: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            model.zero_grad()
            started = time.thread_time()
            model(x).sum().backward()
            times_s[name].append(time.thread_time() - started)
    params = len(list(bare.parameters()))
    rows: list[dict[str, object]] = []
    least_s = {name: min(each) for name, each in times_s.items()}
    usual_s = statistics.median(times_s["bare"])
    one_bucket_s = least_s["overlapped, one bucket"]
    for name, model in models.items():
        launches = len(model._reducer.bucket_sizes()) - 1 if name in OVERLAPPED else 0
        added_us = 1e6 * (least_s[name] - least_s["bare"])
        row = {"reduction": name, "n": rounds, "launches": launches, "us a parameter": added_us / params}
        for column, each_s in (("p50", statistics.median(times_s[name])), ("p95", p95(times_s[name]))):
            row[f"{column} us a parameter"] = 1e6 * (each_s - usual_s) / params
        if launches > 1:
            row["us a launch"] = 1e6 * (least_s[name] - one_bucket_s) / (launches - 1)
        rows.append(row)
    Path(directory, "result.json").write_text(json.dumps(rows))


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--rounds", type=int, default=100)
    options = arguments.parse_args()
    import paceline as dist

    with tempfile.TemporaryDirectory() as directory:
        dist.spawn(rank_main, (options.rounds, directory), 1)
        rows = json.loads(Path(directory, "result.json").read_text())
    show(f"Added to forward and backward of {2 * LAYERS} parameters", rows, options.json)


if __name__ == "__main__":
    main()
