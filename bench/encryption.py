"""What does encryption cost an all-reduce of float32 between two hosts?

    python bench/encryption.py [--rates none 1gbit 10gbit] [--streams 1] [--sizes BYTES ...] [--json FILE]

Hosts are network namespaces of this machine, joined by veth pairs, whose rate `tc tbf` bounds. A group with encrypted
connections and one with plain ones take turns in the same processes, one thread a rank. Medians. "of AES-GCM" is what
the encrypted group sends a second, over what one core seals with AES-128-GCM in records of 16 KiB (`openssl speed`):
each rank seals what it sends and opens what it receives on one core, which it needs for the reduction too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from hosts.fixture import Hosts
from report import human, interleaved, parser, show

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20]
ROUNDS = 7
SLOWEST_BYTES_PER_S = {"none": 5e8, "1gbit": 1.2e8, "10gbit": 5e8}
CIPHER = "aes-128-gcm"


def rank_main(sizes: list[int], rate: str) -> dict[int, dict[str, float]]:
    import torch

    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    groups = {}
    for level in ("auth", "encrypt"):  # connections are made when a group forms
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
        calls = dict.fromkeys(contestants, max(1, min(500, int(0.1 / one_s))))
        results[nbytes] = interleaved(contestants, calls, ROUNDS)
    dist.barrier()
    dist.destroy_process_group()
    return results


def sealed_bytes_per_s() -> float | None:
    """Returns what one core seals in a second; None without the `openssl` command."""
    if shutil.which("openssl") is None:
        return None
    command = ["openssl", "speed", "-elapsed", "-seconds", "1", "-bytes", "16384", "-evp", CIPHER]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"^{CIPHER}\s+([\d.]+)k", told, re.IGNORECASE | re.MULTILINE)
    return float(found[1]) * 1000 if found else None


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--rates", nargs="+", default=["none", "10gbit", "1gbit"])
    arguments.add_argument("--streams", type=int, default=1, help="connections for data between two ranks")
    arguments.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    options = arguments.parse_args()
    os.environ["PACELINE_STREAMS"] = str(options.streams)
    sealed = sealed_bytes_per_s()
    rows: list[dict[str, object]] = []
    for rate in options.rates:
        network = Hosts(2, 1, rate=None if rate == "none" else rate)
        for nbytes, times in network(rank_main, options.sizes, rate, timeout_s=600)[0].items():
            row: dict[str, object] = {"rate": rate, "size": human(nbytes)}
            row |= {"plain µs": 1e6 * times["auth"], "encrypted µs": 1e6 * times["encrypt"]}
            row["encrypted / plain"] = times["encrypt"] / times["auth"]
            if sealed is not None:
                row["of AES-GCM"] = nbytes / times["encrypt"] / sealed
            rows.append(row)
    title = "all_reduce of float32 between two hosts, one thread a rank"
    if sealed is not None:
        title += f"; one core seals {sealed / 1e9:.2f} GB/s with {CIPHER.upper()}"
    show(title, rows, options.json)


if __name__ == "__main__":
    main()
