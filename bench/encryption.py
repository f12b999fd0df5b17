"""Measures the time that encryption adds to a float32 all-reduce between two hosts.

    python bench/encryption.py [--rates none 1gbit 10gbit] [--streams 1] [--sizes BYTES ...] [--json FILE]

Hosts are network namespaces of this machine, joined by veth pairs with rates limited by `tc tbf`. A group with
encrypted connections and a group with plain connections alternate in the same processes, with one thread per rank. p50
and p95 are computed over the turns, and n is the number of calls. The times per core are the calling thread's processor
times, which other load on the machine hardly affects. Each of the two ranks sends and receives every byte of the tensor
once, so "ns a byte" is the time for encrypting one byte and decrypting another, including copies and system calls;
compare it with the speed of AES-128-GCM that `openssl speed` reports.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from hosts.fixture import Hosts
from report import Spread, human, interleaved, parser, show

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20]
ROUNDS = 20
SLOWEST_BYTES_PER_S = {"none": 5e8, "1gbit": 1.2e8, "10gbit": 5e8}
CIPHER = "aes-128-gcm"


def rank_main(sizes: list[int], rate: str) -> dict[int, tuple[dict[str, Spread], dict[str, float]]]:
    import torch

    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    groups = {}
    for level in ("auth", "encrypt"):  # connections are established when a group is created
        os.environ["PACELINE_SECURITY"] = level
        groups[level] = dist.new_group()
    results = {}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        contestants = {
            level: lambda tensor=tensor, group=group: dist.all_reduce(tensor, group=group)
            for level, group in groups.items()
        }
        for call in contestants.values():
            call()
            call()
        one_s = max(1e-4, nbytes / SLOWEST_BYTES_PER_S[rate])
        calls = dict.fromkeys(contestants, max(1, min(180, int(0.035 / one_s))))
        results[nbytes] = interleaved(contestants, calls, ROUNDS, dist.barrier), core_seconds(contestants, calls)
    dist.barrier()
    dist.destroy_process_group()
    return results


def core_seconds(contestants: dict[str, Callable[[], object]], calls: dict[str, int]) -> dict[str, float]:
    """Returns each contestant's median processor time per call, in seconds; the contestants alternate."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, call in contestants.items():
            started = time.thread_time()
            for _ in range(calls[name]):
                call()
            times[name].append((time.thread_time() - started) / calls[name])
    return {name: statistics.median(measured) for name, measured in times.items()}


def sealed_bytes_per_s() -> float | None:
    """Returns the number of bytes that one core encrypts per second, or None if `openssl` is not installed."""
    if shutil.which("openssl") is None:
        return None
    command = ["openssl", "speed", "-elapsed", "-seconds", "1", "-bytes", "16384", "-evp", CIPHER]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"^{CIPHER}\s+([\d.]+)k", told, re.IGNORECASE | re.MULTILINE)
    return float(found[1]) * 1000 if found else None


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--rates", nargs="+", default=["none", "10gbit", "1gbit"])
    arguments.add_argument("--streams", type=int, default=1, help="number of data connections between two ranks")
    arguments.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    options = arguments.parse_args()
    os.environ["PACELINE_STREAMS"] = str(options.streams)
    sealed = sealed_bytes_per_s()
    rows: list[dict[str, object]] = []
    for rate in options.rates:
        network = Hosts(2, 1, rate=None if rate == "none" else rate)
        for nbytes, (times, cores) in network(rank_main, options.sizes, rate, timeout_s=600)[0].items():
            row: dict[str, object] = {"rate": rate, "size": human(nbytes)}
            row["n"] = times["auth"]["n"]
            for name, each in (("plain", times["auth"]), ("encrypted", times["encrypt"])):
                row |= {f"{name} µs": 1e6 * each["p50_s"], f"{name}, p95 µs": 1e6 * each["p95_s"]}
            row["encrypted / plain"] = times["encrypt"]["p50_s"] / times["auth"]["p50_s"]
            row |= {"core, plain µs": 1e6 * cores["auth"], "core, encrypted µs": 1e6 * cores["encrypt"]}
            row["ns a byte"] = 1e9 * (cores["encrypt"] - cores["auth"]) / nbytes
            rows.append(row)
    title = "all_reduce of float32 between two hosts, one thread a rank"
    if sealed is not None:
        title += f"; one core seals {sealed / 1e9:.2f} GB/s with {CIPHER.upper()} ({1e9 / sealed:.2f} ns a byte)"
    show(title, rows, options.json)


if __name__ == "__main__":
    main()
