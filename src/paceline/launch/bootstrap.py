"""The first thing that runs in a worker: `python bootstrap.py LAUNCHER_PID [-m] SCRIPT ARGS...`.

Ties the worker to its launcher and records its uncaught exception; then runs the script as `python SCRIPT` would.
Kept apart from the package's imports, since every worker pays for it.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Runs the worker's script."""
    launcher, *rest = sys.argv[1:]
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path[0] = package  # this file's own directory is not the script's
    from paceline.launch.failures import record_uncaught
    from paceline.launch.lifeline import die_with_parent

    die_with_parent(int(launcher))
    record_uncaught(os.environ["PACELINE_ERROR_FILE"])
    if rest[0] == "-m":
        sys.argv = rest[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        return
    script = rest[0]
    sys.argv = rest
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    namespace = sys.modules["__main__"].__dict__
    for name in ("main", "annotations"):
        del namespace[name]
    namespace["__file__"] = script
    exec(code, namespace)


if __name__ == "__main__":
    main()
