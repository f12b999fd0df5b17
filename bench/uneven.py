"""Compares an all-reduce between hosts whose links have unequal rates with the optimum and with fixed algorithms.

    python bench/uneven.py [--cases slow-host slow-pair two-racks] [--sizes BYTES] [--fast RATE] [--slow RATE]
    python bench/uneven.py --measured

The four hosts, which run one rank each, are network namespaces on this machine. All links have the fast rate except,
depending on the case, one host's link, the link between two hosts, or the uplink of each rack of two hosts.
PACELINE_NETWORK describes the rates; with `--measured`, Paceline measures them during rendezvous instead. Paceline
chooses the algorithm accordingly. Each fixed algorithm is forced in a separate group. All groups alternate in the same
processes, with one thread per rank. Each turn ends with a barrier, so it lasts until all ranks have the sum. "of
optimum" is the shortest time that any schedule can achieve (derived in docs/uneven-networks.md), divided by the median;
with frames of 1500 bytes, 95.6% of a link's rate is available for payload.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from hosts.fixture import Hosts, HostsWorld
from hosts.network import Network
from report import Spread, compared, human, interleaved, load, parser, show

PAYLOAD = 0.956
ROUNDS = 5
UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
FIXED = ("ring", "hierarchical", "halving_doubling", "tree", "star")


class Case:
    """A network. `shape` derives it from a network with equally fast links.

    `described` is the value of PACELINE_NETWORK. `least` contains the minimum number of bytes per byte of the tensor
    that the slow link must carry, and the minimum for the fast link.
    """

    def __init__(
        self, shape: Callable[..., None], described: Callable[[str], dict[str, object]], slow: float, fast: float
    ) -> None:
        self.shape = shape
        self.described = described
        self.least = slow, fast


CASES = {
    "slow-host": Case(lambda network, slow: network.bound(3, slow), lambda slow: {"nodes": {"3": slow}}, 1, 1.5),
    "slow-pair": Case(lambda network, slow: network.join(0, 1, slow), lambda slow: {"pairs": {"0-1": slow}}, 0, 1.5),
    "two-racks": Case(
        lambda network, slow: network.part([2, 3], slow),
        lambda slow: {"groups": {"rack0": [[0, 1], slow], "rack1": [[2, 3], slow]}},
        1,
        1.5,
    ),
}


class Uneven(Hosts):
    """Hosts whose network is changed before the ranks start."""

    def __init__(self, rate: str, shape: Callable[..., None]) -> None:
        super().__init__(4, rate=rate)
        self.shape = shape

    def start(self, fn: Callable[..., object], *args: object) -> HostsWorld:
        network = Network(4, 1, self.mtu, self.rate, None)
        try:
            self.shape(network)
            return HostsWorld(network, self.ranks_of_hosts, fn, args)
        except BaseException:
            network.close()
            raise


def rank_main(sizes: Sequence[int], described: str) -> tuple[dict[int, dict[str, Spread]], list[str]]:
    import os

    import torch

    import paceline as dist

    torch.set_num_threads(1)
    if described:
        os.environ["PACELINE_NETWORK"] = described
    dist.init_process_group()
    groups = {name: dist.new_group(algorithm=name) for name in FIXED}
    results = {}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)

        def until_all_have_it(group: dist.ProcessGroup | None, tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor, group=group)
            dist.barrier()  # otherwise work that is still pending would slow down the next call

        contestants: dict[str, Callable[[], object]] = {"paceline": partial(until_all_have_it, None)}
        for name, group in groups.items():
            contestants[name] = partial(until_all_have_it, group)
        for call in contestants.values():
            call()
        results[nbytes] = interleaved(contestants, dict.fromkeys(contestants, 1), ROUNDS)
    explained = [dist.explain("all_reduce", nbytes) for nbytes in sizes]
    dist.barrier()
    dist.destroy_process_group()
    return results, explained


def bytes_per_s(rate: str) -> float:
    return float(rate[:-4]) * UNITS[rate[-4:]] * PAYLOAD


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments.add_argument("--sizes", type=int, nargs="+", default=[8 << 20], metavar="BYTES")
    arguments.add_argument("--fast", default="400mbit", metavar="RATE")
    arguments.add_argument("--slow", default="100mbit", metavar="RATE")
    arguments.add_argument("--measured", action="store_true", help="do not describe the links")
    options = arguments.parse_args()
    rows: list[dict[str, object]] = []
    for name in options.cases:
        case = CASES[name]
        described = json.dumps({"node": f"{options.fast},0.1ms", **case.described(f"{options.slow},0.1ms")})
        hosts = Uneven(options.fast, partial(case.shape, slow=options.slow))
        answers = hosts(rank_main, options.sizes, "" if options.measured else described, timeout_s=600)
        results, explained = cast("tuple[dict[int, dict[str, Spread]], list[str]]", answers[0])
        for nbytes, text in zip(options.sizes, explained, strict=True):
            chosen = next(line.split()[1] for line in text.splitlines() if line.startswith("->"))
            least_s = max(
                share * nbytes / bytes_per_s(rate)
                for share, rate in zip(case.least, (options.slow, options.fast), strict=True)
            )
            for row in compared(results[nbytes], "paceline", "ms"):
                row["of optimum"] = least_s / results[nbytes][str(row["by"])]["p50_s"]
                rows.append({"case": name, "chosen": chosen, "size": human(nbytes), **row})
    show(f"all_reduce of float32 on 4 hosts whose links differ, load {load()} at the end", rows, options.json)


if __name__ == "__main__":
    main()
