"""Compares DiLoCo's speed over a slow link with that of training alone, and its loss with that of exact training.

    python bench/diloco.py [--steps 700] [--seeds 0 1 2] [--rate 10mbit] [--delay 20] [--methods NAME ...] [--json FILE]
    python bench/diloco.py --rate none --methods DiLoCo --lr 2e-3 4e-3 8e-3        tries learning rates, on one host

Two hosts (network namespaces of this machine) train the model of examples/char_lm.py with its batch size, on one thread
each. "alone" does not communicate at all. Over a slow link, each of the other methods alternates with "alone" in the
same processes, and "of alone" is the method's rate divided by that of "alone". "DDP" is Paceline's
DistributedDataParallel, which sends 2.5 MB in each step. Over a slow link, only its rate is measured, over a few steps;
its loss is taken from a run without a rate limit. Rates cover the whole training run, including the last exchange but
not the first steps. The held-out loss is computed with the mean of the ranks' parameters.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import char_text
import torch
from hosts.fixture import Hosts
from report import parser, show
from world import Ranks

BATCH_SIZE = 16
WARM_UP = 5
TURN = 50  # steps
PAUSE_S = 0.5  # pending exchanges complete before each turn
STEPS_OF_DDP_ON_A_SLOW_LINE = 12
METHODS = ("alone", "DDP", "DiLoCo", "local SGD")
BEST_LR = {"alone": 4e-3, "DDP": 5e-3, "DiLoCo": 5e-3, "local SGD": 5e-3}  # the best of the learning rates tried


@dataclass(frozen=True)
class Way:
    """A training method."""

    method: str
    lr: float
    every: int
    fragments: int
    wire: str | None
    delay: int | None
    mix: float
    outer_lr: float
    momentum: float


class Training:
    """A rank's training run with one method and a learning rate schedule of `steps` steps."""

    def __init__(self, way: Way, steps: int, seed: int) -> None:
        import paceline as dist

        self._text = char_text.Text.read()
        torch.manual_seed(seed)
        self._model = char_text.Model()
        self._generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        self._wrapped = dist.DistributedDataParallel(self._model) if way.method == "DDP" else self._model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=way.lr, betas=(0.9, 0.98))
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, way.lr, total_steps=steps, pct_start=0.1)
        self._local = local_training(self._model, self._optimizer, way)
        self.took_s = self.waited_s = 0.0

    def train(self, steps: int) -> None:
        began_s = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            batch = char_text.batch(self._text.train, BATCH_SIZE, self._generator)
            char_text.loss_of(self._wrapped, *batch).backward()
            self._optimizer.step()
            self._schedule.step()
            if self._local is not None:
                self._local.step()
        self.took_s += time.perf_counter() - began_s

    def finish(self) -> float:
        """Completes the training run, and returns its held-out loss."""
        if self._local is not None:
            began_s = time.perf_counter()
            self.waited_s = self._local.communication_wait_s()
            self._local.finish()
            self.took_s += time.perf_counter() - began_s
        return char_text.held_out_loss(self._model, self._text.test)


def rank_main(way: Way, steps: int, measured: int, seed: int, compares: bool) -> dict[str, float]:
    """Trains for `measured` steps of a `steps`-step schedule; if `compares` is set, alternates with training alone."""
    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    training = Training(way, steps, seed)
    taking_turns = [training]
    if compares:
        taking_turns.append(Training(replace(way, method="alone"), steps, seed))
    for each in taking_turns:
        each.train(WARM_UP)
        each.took_s = 0.0
    for done in range(WARM_UP, measured, TURN):
        for each in taking_turns:
            dist.barrier()
            time.sleep(PAUSE_S)
            each.train(min(TURN, measured - done))
    loss = training.finish()
    dist.barrier()
    dist.destroy_process_group()
    rate, *alone = ((measured - WARM_UP) / each.took_s for each in taking_turns)
    return {
        "rate": rate,
        "alone": min(alone, default=rate),
        "loss": loss,
        "waited": training.waited_s / training.took_s,
    }


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


def row_of(way: Way, options: object) -> dict[str, object]:
    answers = {}
    rate, steps = options.rate, options.steps
    for seed in options.seeds:
        measured = min(steps, STEPS_OF_DDP_ON_A_SLOW_LINE) if way.method == "DDP" and rate != "none" else steps
        compares = rate != "none" and way.method != "alone"
        ranks = places_of(rate, options.delay)(rank_main, way, steps, measured, seed, compares, timeout_s=3600)
        answers[seed] = ranks[0] | {name: min(each[name] for each in ranks) for name in ("rate", "alone")}
        if measured < steps:
            exact = places_of("none", 0)(rank_main, way, steps, steps, seed, False, timeout_s=3600)
            answers[seed]["loss"] = exact[0]["loss"]
        print(way, seed, answers[seed], file=sys.stderr, flush=True)
    ratios = [each["rate"] / each["alone"] for each in answers.values()]
    row: dict[str, object] = {"method": way.method, "lr": way.lr}
    if way.method in ("DiLoCo", "local SGD"):
        row |= {"every": way.every, "fragments": way.fragments, "wire": way.wire or "exact", "delay": way.delay}
    if way.method == "DiLoCo":
        row |= {"outer lr": way.outer_lr, "momentum": way.momentum, "mix": way.mix}
    losses = [each["loss"] for each in answers.values()]
    return row | {
        "steps/s": statistics.median(each["rate"] for each in answers.values()),
        "of alone": statistics.median(ratios) if rate != "none" else None,
        "least": min(ratios) if rate != "none" else None,
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
    arguments.add_argument("--rate", default="10mbit", help='rate of the link, or "none" for one host')
    arguments.add_argument("--delay", type=float, default=20, help="one-way delay of the link, in ms")
    arguments.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    arguments.add_argument("--lr", type=float, nargs="+", help="peak learning rates; by default the best known")
    arguments.add_argument("--every", type=int, nargs="+", default=[4])
    arguments.add_argument("--fragments", type=int, default=4)
    arguments.add_argument("--wire", nargs="+", default=["int4"], choices=["none", "bf16", "int8", "int4"])
    arguments.add_argument("--use-after", type=int, nargs="+", help="number of steps before a result is used")
    arguments.add_argument("--mix", type=float, nargs="+", default=[0.0])
    arguments.add_argument("--outer", nargs="+", default=["1.0,0.0"], metavar="LR,MOMENTUM")
    options = arguments.parse_args()
    rows = [row_of(way, options) for method in options.methods for way in ways(method, options)]
    line = "one host" if options.rate == "none" else f"2 hosts, {options.rate}, {options.delay:g} ms one way"
    show(f"char_lm, batches of {BATCH_SIZE} a rank, {options.steps} steps; {line}", rows, options.json)


def ways(method: str, options: object) -> list[Way]:
    lrs = options.lr or [BEST_LR[method]]
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
