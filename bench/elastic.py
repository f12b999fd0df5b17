"""Measures how much an elastic job is delayed by elasticity itself, and by workers that die, freeze, join or are slow.

    python bench/elastic.py [--cases death peers overhead shards join frozen ...] [--kills 200] [--json FILE]

- death: random workers are killed with SIGKILL at random instants. For each survivor, `pause` is the longest time
  between two steps before the replacement is in the view, minus the median step; `back` is the time until the first
  commit of a step that had not been committed before. Lost steps and samples are counted, and the digest is compared
  with that of a run in one process.
- peers: the same with torchft (needs --torchft) and with torchrun, gloo and checkpoints. The systems' jobs alternate.
- overhead: the training loop with shards, alternately in an elastic job and in a job that is not elastic.
- shards: the loop with as many shards as workers, compared with DistributedDataParallel on the same samples. `overhead`
  and `shards` also run a third loop, which trains the bare model with a barrier after the backward pass ("barrier").
- join: the time until a replacement is in the view, the other workers' pause at that moment, their longest earlier
  pause (while senders fork and the replacement receives the state), and the slowdown of their earlier steps. These
  times are measured for the loop with shards and the usual loop, for states of several sizes, on one machine and on two
  (network namespaces at 1 Gbit/s, as root). As a lower bound for the slowdown, the same loop also runs alongside an
  unrelated process that uses the same share of a core as the replacements.
- frozen: one worker is stopped (SIGSTOP). In another job, one worker is 10 times slower than the other workers.
- speeds: the speed of a job whose workers have the speeds 1, 1, 1/2 and 1/2, compared with the sum of these speeds.
- partition: five machines are partitioned into three and two (as root).
- coordinator: the launcher that coordinates three machines is killed, or a connection to it is reset (as root).
- thin: two machines connected at 10 Mbit/s (as root).

For torchft: python -m venv DIR && DIR/bin/pip install torchft-nightly, then --torchft DIR/bin/python.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from elastic_cases import coordinators, death, joining, networks, slow, speeds, undisturbed
from elastic_cases.options import Options, Rows
from report import keep, parser, show

CASES: dict[str, Callable[[Options], tuple[str, Rows]]] = {
    "death": death.measure,
    "peers": death.measure_peers,
    "overhead": undisturbed.measure_overhead,
    "shards": undisturbed.measure_shards,
    "join": joining.measure,
    "frozen": slow.measure,
    "speeds": speeds.measure,
    "partition": networks.measure_partition,
    "coordinator": coordinators.measure,
    "thin": networks.measure_thin,
}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a normal exit, which stops all started processes
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=", ".join(CASES))
    arguments.add_argument(
        "--kills", type=int, default=200, help="number of kills in `death`; each row of the other cases has a tenth"
    )
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=1500, help="number of steps of a job whose workers are killed")
    arguments.add_argument("--rounds", type=int, default=15, help="number of rounds in which the loops alternate")
    arguments.add_argument(
        "--states", type=int, nargs="+", default=[1, 100, 1024], metavar="MIB", help="state sizes in `join`"
    )
    arguments.add_argument("--models", nargs="+", default=["transformer", "CNN"], help="models from bench/ddp.py")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument(
        "--torchft", metavar="PYTHON", default=os.environ.get("TORCHFT_PYTHON"), help="an interpreter that has torchft"
    )
    given = arguments.parse_args()
    options = Options(
        workers=given.workers,
        steps=given.steps,
        kills=given.kills,
        rounds=given.rounds,
        states=tuple(given.states),
        models=tuple(given.models),
        torchft=given.torchft,
        seed=given.seed,
    )
    tables: list[dict[str, object]] = []
    for case in given.cases:
        title, rows = CASES[case](options)
        show(title, rows, None)
        tables.append({"case": case, "title": title, "rows": rows})
    if given.json:
        keep(tables, given.json)


if __name__ == "__main__":
    main()
