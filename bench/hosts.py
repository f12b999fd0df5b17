"""Compares the duration of a float32 all-reduce between hosts with that of the same all-reduce over torch's gloo.

    python bench/hosts.py [--hosts 2 4] [--per-host 1] [--rates none 1gbit 10gbit] [--delays 0 0.1 20] [--json FILE]
    python bench/hosts.py --hosts 4 --rates 1gbit --delays 0 --algorithms ring hierarchical circulant
    python bench/hosts.py --hosts 2 --rates 1gbit --delays 0 --sizes 67108864 --wires bf16 int8 int4

Hosts are network namespaces of this machine, joined by veth pairs with rates limited by `tc tbf`. A small bridge
program from the tests adds the delays. It forwards about 8 Gbit/s, so delays are measured at 1gbit only. Paceline and
gloo alternate in the same processes with one thread per rank, and a barrier precedes each turn. p50 and p95 are
computed over the turns, n is the number of calls, and the ratio is a contestant's median divided by Paceline's. "of
line" is the throughput, 2 (n - 1) / n times the size of the tensor divided by the time, as a fraction of the line rate
available for payload (95.6% with frames of 1500 bytes). `--algorithms` adds groups in which these algorithms are
forced. `--wires` adds averages of normally distributed numbers that are rounded between hosts, with error feedback.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from hosts.fixture import Hosts
from report import Spread, compared, human, interleaved, parser, show

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20]
ROUNDS = 20
RATES = {"1gbit": 1e9, "10gbit": 10e9}
PAYLOAD = 0.956


def calls_for(nbytes: int, delay_ms: float, rate: str) -> int:
    """Returns the number of calls that take about 25 ms in total."""
    bytes_per_s = RATES.get(rate, 20e9) / 8
    one = max(1e-4, 4e-3 * delay_ms, nbytes / bytes_per_s)
    return max(1, min(125, int(0.025 / one)))


def rank_main(
    sizes: list[int],
    delay_ms: float,
    rate: str,
    with_flat: bool,
    algorithms: list[str],
    wires: list[str],
    directory: str,
) -> tuple[dict[int, dict[str, Spread]], dict[int, str]]:
    import os

    import torch
    import torch.distributed as gloo

    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    gloo.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=ranks)
    flat = dist.new_group(algorithm="ring") if with_flat else None
    forced = {name: dist.new_group(algorithm=name) for name in algorithms}
    results = {}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        contestants = {
            "paceline": lambda tensor=tensor: dist.all_reduce(tensor),
            "gloo": lambda tensor=tensor: gloo.all_reduce(tensor),
        }
        if with_flat:
            contestants["flat ring"] = lambda tensor=tensor: dist.all_reduce(tensor, group=flat)
        for name, group in forced.items():
            contestants[name] = partial(dist.all_reduce, tensor, group=group)
        numbers = torch.randn(nbytes // 4)
        for kind in wires:
            wire = dist.Wire(kind)
            contestants[kind] = partial(dist.all_reduce, numbers, dist.ReduceOp.AVG, wire=wire)
        for call in contestants.values():
            call()
            call()
        calls = dict.fromkeys(contestants, calls_for(nbytes, delay_ms, rate))
        results[nbytes] = interleaved(contestants, calls, ROUNDS, dist.barrier)
    explained = {nbytes: dist.explain("all_reduce", nbytes) for nbytes in sizes}
    dist.barrier()
    gloo.destroy_process_group()
    dist.destroy_process_group()
    return results, explained


def chosen_in(explained: str) -> str:
    """Returns the algorithm that the group uses."""
    return next(line.split()[1] for line in explained.splitlines() if line.startswith("->"))


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--per-host", type=int, default=1)
    arguments.add_argument("--rates", nargs="+", default=["none", "1gbit", "10gbit"])
    arguments.add_argument("--delays", type=float, nargs="+", default=[0, 0.1, 20], help="one-way delays, in ms")
    arguments.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    arguments.add_argument(
        "--algorithms", nargs="*", default=[], metavar="NAME", help="algorithms to force in additional groups"
    )
    arguments.add_argument("--wires", nargs="*", default=[], choices=["bf16", "int8", "int4"])
    options = arguments.parse_args()
    rows: list[dict[str, object]] = []
    for hosts in options.hosts:
        for rate in options.rates:
            for delay_ms in options.delays:
                if delay_ms and rate != "1gbit":
                    continue
                network = Hosts(hosts, options.per_host, rate=None if rate == "none" else rate, delay_ms=delay_ms)
                ranks = hosts * options.per_host
                with tempfile.TemporaryDirectory() as directory:
                    answers = network(
                        rank_main,
                        options.sizes,
                        delay_ms,
                        rate,
                        options.per_host > 1,
                        options.algorithms,
                        options.wires,
                        directory,
                        timeout_s=600,
                    )
                where = {"hosts": f"{hosts}x{options.per_host}", "rate": rate, "delay ms": delay_ms}
                results, explained = cast("tuple[dict[int, dict[str, Spread]], dict[int, str]]", answers[0])
                for nbytes, spreads in results.items():
                    for row in compared(spreads, "paceline"):
                        if row["by"] == "paceline":
                            row["chosen"] = chosen_in(explained[nbytes])
                        if rate in RATES:
                            moved = 2 * (ranks - 1) / ranks * nbytes * 8
                            line_s = moved / (RATES[rate] * PAYLOAD)
                            row["of line"] = line_s / spreads[str(row["by"])]["p50_s"]
                        rows.append({**where, "size": human(nbytes), **row})
    show("all_reduce of float32 between hosts, one thread a rank", rows, options.json)


if __name__ == "__main__":
    main()
