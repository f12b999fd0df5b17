"""A process that has finished the slow imports and becomes workers by forking.

It is used with `--start-method forkserver`, and by default where there are many workers a core.

    python template.py LAUNCHER_PID DESCRIPTOR

A worker is forked twice: when the process in between has ended, the launcher, which adopts orphans, becomes its parent,
as if the launcher had started it. The template ends when all workers have been started. It imports no torch, whose
threads would not survive a fork.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from types import ModuleType

_LARGEST = 1 << 18


def main() -> None:
    """Forks a worker for each request; in a worker, runs its script."""
    launcher, connection = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from paceline.launch import bootstrap

    bootstrap.die_with_parent(launcher)
    with suppress(ImportError):  # the core was built for another Python; workers that need it report that
        import_module(
            "paceline.rendezvous.rendezvous"
        )  # it makes a worker slow to start, and every worker needs it to meet the others

    gc.freeze()
    while True:
        request, streams, _, _ = socket.recv_fds(connection, _LARGEST, 3)
        if not request:
            return
        between = os.fork()
        if between == 0:
            worker = os.fork()
            if worker:
                connection.send(worker.to_bytes(4, "little"))
                os._exit(0)
            break
        os.waitpid(between, 0)
        for fd in streams:
            os.close(fd)
    connection.close()
    os.setsid()
    for fd, own in zip(streams, (0, 1, 2), strict=True):
        os.dup2(fd, own)
        os.close(fd)
    command = json.loads(request)
    os.environ.update(command["variables"])
    while os.getppid() != launcher:  # until the process in between has ended
        if not os.path.exists(f"/proc/{launcher}"):
            os._exit(1)
        time.sleep(0.0005)
    sys.path.pop(0)
    sys.path.insert(0, "")
    sys.modules["__main__"] = ModuleType("__main__")
    bootstrap.run([str(launcher), *command["argv"]])


if __name__ == "__main__":
    main()
