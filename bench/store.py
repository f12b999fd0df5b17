"""Compares the speed of TCPStore with that of torch's TCPStore.

    python bench/store.py [--json FILE]

The server runs in this process, and the clients are threads of another process. Requests to the two stores alternate.
The rates are medians and 5th percentiles (p5) over n turns.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

from report import p5, parser, show

CLIENTS = [1, 64]
OPERATIONS = ["set", "get", "add", "wait"]
SECONDS = 0.1
ROUNDS = 20


def operate(store: object, operation: str, who: int, stop: threading.Event, counts: list[int]) -> None:
    key = f"key{who}"
    done = 0
    while not stop.is_set():
        for _ in range(20):
            if operation == "set":
                store.set(key, "value")
            elif operation == "get":
                store.get("shared")
            elif operation == "add":
                store.add("counter", 1)
            else:
                store.wait(["shared"])
        done += 20
    counts[who] = done


def measure(stores: list[object], operation: str) -> float:
    """Returns the number of operations per second, of all clients together."""
    stop = threading.Event()
    counts = [0] * len(stores)
    threads = [threading.Thread(target=operate, args=(s, operation, at, stop, counts)) for at, s in enumerate(stores)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(SECONDS)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)


def client_main(rank: int, ports: dict[str, int], directory: str) -> None:
    import torch.distributed

    import paceline as dist

    timeout = timedelta(seconds=60)
    results = []
    for clients in CLIENTS:
        stores = {
            "paceline": [dist.TCPStore("127.0.0.1", ports["paceline"], timeout=timeout) for _ in range(clients)],
            "torch": [
                torch.distributed.TCPStore("127.0.0.1", ports["torch"], timeout=timeout, wait_for_workers=False)
                for _ in range(clients)
            ],
        }
        for each in stores.values():
            each[0].set("shared", "value")
        for operation in OPERATIONS:
            rates: dict[str, list[float]] = {"paceline": [], "torch": []}
            for _ in range(ROUNDS):
                for name, connected in stores.items():
                    rates[name].append(measure(connected, operation))
            median = {name: statistics.median(each) for name, each in rates.items()}
            results.append(
                {
                    "clients": clients,
                    "operation": operation,
                    "n": ROUNDS,
                    "paceline 1/s": median["paceline"],
                    "paceline, p5 1/s": p5(rates["paceline"]),
                    "torch 1/s": median["torch"],
                    "torch, p5 1/s": p5(rates["torch"]),
                    "paceline / torch": median["paceline"] / median["torch"],
                }
            )
    Path(directory, "result.json").write_text(json.dumps(results))


def main() -> None:
    options = parser(__doc__.split("\n")[0]).parse_args()
    import torch.distributed

    import paceline as dist

    ours = dist.TCPStore("127.0.0.1", 0, is_master=True)
    theirs = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as directory:
        # PACELINE_SECRET belongs to the spawned job; the store above has no secret, so the client must have none either
        dist.spawn(_client, ({"paceline": ours.port, "torch": theirs.port}, directory), 1)
        rows = json.loads(Path(directory, "result.json").read_text())
    show("TCPStore: operations a second, all clients together", rows, options.json)


def _client(rank: int, ports: dict[str, int], directory: str) -> None:
    import os

    os.environ.pop("PACELINE_SECRET", None)
    client_main(rank, ports, directory)


if __name__ == "__main__":
    main()
