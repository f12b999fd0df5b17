"""Measures how long one rank of a very large world takes to build its all-reduce schedule.

    python bench/schedules.py [--world-size N] [--ranks-a-host N] [--json FILE]

n is the number of times that each schedule was built.
"""

from __future__ import annotations

import time

from report import columns_of, parser, show, spread

from paceline.comm.schedule.algorithms import ALGORITHMS, build
from paceline.comm.schedule.steps import Operation


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--world-size", type=int, default=10_000)
    arguments.add_argument("--ranks-a-host", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    n, width = options.world_size, options.ranks_a_host
    hosts = [range(first, min(first + width, n)) for first in range(0, n, width)]
    rows: list[dict[str, object]] = []
    for algorithm in ALGORITHMS:
        for rank in (0, n // 3):
            times = []
            for _ in range(options.rounds):
                started = time.perf_counter()
                schedule = build(algorithm, Operation.ALL_REDUCE, rank, n, hosts=hosts)
                times.append(time.perf_counter() - started)
            rows.append(
                {
                    "algorithm": algorithm,
                    "rank": rank,
                    "steps": len(schedule.steps),
                    "blocks": schedule.blocks,
                    **columns_of(spread(times), "ms"),
                }
            )
    show(f"One rank's all-reduce schedule in a world of {n:,}, {width} ranks a host", rows, options.json)


if __name__ == "__main__":
    main()
