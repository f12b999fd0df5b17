"""Does DiLoCo train over a slow line as fast as without communication, and as well as exact data parallel training?

    python bench/diloco.py [--steps 700] [--seeds 0 1 2] [--rate 10mbit] [--delay 20] [--methods NAME ...] [--json FILE]
    python bench/diloco.py --rate none --methods DiLoCo --lr 2e-3 4e-3 8e-3        tries learning rates, on one host

Two hosts, which are network namespaces of this machine, train the model of examples/char_lm.py with its batch size, one
thread each. "alone" does not communicate at all; its rate is what the others are compared with, in the same run and
with the same seed. "DDP" is Paceline's DistributedDataParallel; it sends 2.5 MB in each step, so over a slow line only
its rate is measured, in few steps, and its loss is that of a run without a bound. Rates are of the whole training with
its last exchange, without the first steps. The held-out loss is that of the mean of the ranks' parameters.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import char_text
import torch
from hosts.fixture import Hosts
from report import parser, show
from world import Ranks

BATCH_SIZE = 16
WARM_UP = 5
STEPS_OF_DDP_ON_A_SLOW_LINE = 12
METHODS = ("alone", "DDP", "DiLoCo", "local SGD")


@dataclass(frozen=True)
class Way:
    """How to train."""

    method: str
    lr: float
    every: int
    fragments: int
    wire: str | None
    delay: int | None
    mix: float
    outer_lr: float
    momentum: float


def rank_main(way: Way, steps: int, measured: int, seed: int) -> dict[str, float]:
    """Trains with a schedule of `steps` steps, of which `measured` are made."""
    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    text = char_text.Text.read()
    torch.manual_seed(seed)
    model = char_text.Model()
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    wrapped = dist.DistributedDataParallel(model) if way.method == "DDP" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=way.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, way.lr, total_steps=steps, pct_start=0.1)
    local = local_training(model, optimizer, way)

    dist.barrier()
    for step in range(measured):
        if step == WARM_UP:
            began_s = time.perf_counter()
        optimizer.zero_grad()
        char_text.loss_of(wrapped, *char_text.batch(text.train, BATCH_SIZE, generator)).backward()
        optimizer.step()
        schedule.step()
        if local is not None:
            local.step()
    waited_s = 0.0
    if local is not None:
        waited_s = local.communication_wait_s()
        local.finish()
    took_s = time.perf_counter() - began_s
    loss = char_text.held_out_loss(model, text.test)
    dist.barrier()
    dist.destroy_process_group()
    return {"rate": (measured - WARM_UP) / took_s, "loss": loss, "waited": waited_s / took_s}


def local_training(model: torch.nn.Module, inner: torch.optim.Optimizer, way: Way) -> object | None:
    import paceline as dist

    options = {"every": way.every, "fragments": way.fragments, "wire": way.wire, "mix": way.mix}
    if way.method == "DiLoCo":
        nesterov = way.momentum > 0
        outer = torch.optim.SGD(model.parameters(), lr=way.outer_lr, momentum=way.momentum, nesterov=nesterov)
        return dist.DiLoCo(model, inner, outer, delay=way.delay, **options)
    if way.method == "local SGD":
        return dist.LocalSGD(model, inner, delay=way.delay or 0, **options)
    return None


def places_of(rate: str, delay_ms: float) -> Callable[..., list[object]]:
    return Ranks(2) if rate == "none" else Hosts(2, 1, rate=rate, delay_ms=delay_ms)


def row_of(way: Way, options: object, rates_alone: dict[int, float]) -> dict[str, object]:
    answers = {}
    for seed in options.seeds:
        rate, steps = options.rate, options.steps
        measured = min(steps, STEPS_OF_DDP_ON_A_SLOW_LINE) if way.method == "DDP" and rate != "none" else steps
        ranks = places_of(rate, options.delay)(rank_main, way, steps, measured, seed, timeout_s=3600)
        answers[seed] = ranks[0] | {"rate": min(each["rate"] for each in ranks)}
        if measured < steps:
            exact = places_of("none", 0)(rank_main, way, steps, steps, seed, timeout_s=3600)
            answers[seed]["loss"] = exact[0]["loss"]
        print(way, seed, answers[seed], file=sys.stderr, flush=True)
    if way.method == "alone":
        rates_alone |= {seed: each["rate"] for seed, each in answers.items()}
    ratios = [each["rate"] / rates_alone[seed] for seed, each in answers.items() if seed in rates_alone]
    row: dict[str, object] = {"method": way.method, "lr": way.lr}
    if way.method in ("DiLoCo", "local SGD"):
        row |= {"every": way.every, "fragments": way.fragments, "wire": way.wire or "exact", "delay": way.delay}
    if way.method == "DiLoCo":
        row |= {"outer lr": way.outer_lr, "momentum": way.momentum, "mix": way.mix}
    losses = [each["loss"] for each in answers.values()]
    return row | {
        "steps/s": statistics.median(each["rate"] for each in answers.values()),
        "of alone": statistics.median(ratios) if ratios else None,
        "least": min(ratios, default=None),
        "waited": statistics.median(each["waited"] for each in answers.values()),
        "held-out loss": statistics.mean(losses),
        "from": min(losses),
        "to": max(losses),
        "n": len(losses),
    }


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--steps", type=int, default=700)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--rate", default="10mbit", help='of the line, or "none" for one host')
    arguments.add_argument("--delay", type=float, default=20, help="of the line, in ms, one way")
    arguments.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    arguments.add_argument("--lr", type=float, nargs="+", help="peak learning rates to try; by default the best found")
    arguments.add_argument("--every", type=int, nargs="+", default=[4])
    arguments.add_argument("--fragments", type=int, default=4)
    arguments.add_argument("--wire", nargs="+", default=["int4"], choices=["none", "bf16", "int8", "int4"])
    arguments.add_argument("--use-after", type=int, nargs="+", help="the delay of results in steps")
    arguments.add_argument("--mix", type=float, nargs="+", default=[0.0])
    arguments.add_argument("--outer", nargs="+", default=["1.0,0.0"], metavar="LR,MOMENTUM")
    options = arguments.parse_args()
    rows, rates_alone = [], dict[int, float]()
    for method in options.methods:
        for way in ways(method, options):
            rows.append(row_of(way, options, rates_alone))
    line = "one host" if options.rate == "none" else f"2 hosts, {options.rate}, {options.delay:g} ms one way"
    show(f"char_lm, batches of {BATCH_SIZE} a rank, {options.steps} steps; {line}", rows, options.json)


def ways(method: str, options: object) -> list[Way]:
    lrs = options.lr or [4e-3]
    if method in ("alone", "DDP"):
        return [Way(method, lr, 0, 0, None, None, 0, 0, 0) for lr in (lrs if method == "DDP" else lrs[:1])]
    outers = [tuple(float(part) for part in each.split(",")) for each in options.outer]
    return [
        Way(method, lr, every, options.fragments, None if wire == "none" else wire, delay, mix, *outer)
        for lr in lrs
        for every in options.every
        for wire in options.wire
        for delay in options.use_after or [None]
        for mix in options.mix
        for outer in (outers if method == "DiLoCo" else [(1.0, 0.0)])
    ]


if __name__ == "__main__":
    main()
