"""A process that has finished the slow imports and forks workers on request.

The launcher runs it by path:

    python template.py LAUNCHER_PID DESCRIPTOR [MODULE... [-- MODULE...]]

A worker is forked twice. When the intermediate process has exited, the launcher becomes the worker's parent, because
the launcher adopts orphans. The template exits when the launcher closes the connection.

The template imports the MODULEs; those after `--` were chosen by the user. Threads do not survive a fork, and their
locks remain locked. Importing torch starts only the threads of numpy's OpenBLAS, which stops these threads before each
fork. To verify this, the template forks once and then lists its other threads. If there are other threads, if a device
has been initialized, or if torch cannot be imported, the template reports this and exits.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType

READY = b"\0"  # sent if workers can be forked; otherwise, the template sends a reason
CHANNEL = "PACELINE_ELASTIC_FD"

_LOOKS, _LOOK_S = 50, 0.01


def main() -> None:
    """Forks a worker for each request; in a worker, runs the worker's script."""
    launcher, connection = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    is_safe_path = getattr(sys.flags, "safe_path", False)  # new in Python 3.11; if True, sys.path[0] is not this folder
    package = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 4))
    sys.path[: 0 if is_safe_path else 1] = [package]
    from paceline.operate.launch.workers import bootstrap

    bootstrap.die_with_parent(launcher)
    gc.disable()  # garbage collection would add 10 % to the time for importing torch
    with suppress(ImportError):  # the C++ core was built for another Python; workers that need the core report that
        import_module("paceline.comm.rendezvous.rendezvous")  # every worker needs this slow import

    reason = _preload(sys.argv[3:]) or _unsafe()
    connection.send(reason.encode() or READY)
    if reason:
        return
    gc.freeze()
    gc.enable()
    while True:
        answer, fds, _, _ = socket.recv_fds(connection, len(READY), 5)
        if not answer:
            os._exit(0)  # skips the interpreter's shutdown, which is slow with torch
        request, *streams = fds
        between = os.fork()
        if between == 0:
            worker = os.fork()
            if worker:
                connection.send(worker.to_bytes(4, "little"))
                os._exit(0)
            break
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)
    connection.close()
    os.setsid()
    with open(request) as file:
        command = json.load(file)
    _show([sys.executable, *command["argv"]])
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [sys.executable, bootstrap.__file__, str(launcher), *command["argv"]]
    for fd, own in zip(streams, (0, 1, 2), strict=False):
        os.dup2(fd, own)
        os.close(fd)
    os.environ.update(command["variables"])
    for fd in streams[3:]:
        os.environ[CHANNEL] = str(fd)
    if command["cores"] is not None:
        with suppress(OSError):  # this process may no longer be allowed to use the cores
            os.sched_setaffinity(0, command["cores"])
    _reset_modules()
    while os.getppid() != launcher:  # waits until the intermediate process has exited
        if not os.path.exists(f"/proc/{launcher}"):
            os._exit(1)
        time.sleep(0.0005)
    sys.path[:1] = [] if is_safe_path else [""]
    sys.modules["__main__"] = _main_module(bootstrap.__file__)
    bootstrap.run([str(launcher), *command["argv"]])


def _reset_modules() -> None:
    """Resets module state that depends on random numbers or the environment, because workers must not share it."""
    for name in ("numpy.random", "sympy.core.random"):
        if name in sys.modules:
            sys.modules[name].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # the script may set TMPDIR


def _main_module(file: str) -> ModuleType:
    """Returns a module `__main__` with the same names as in a new interpreter that runs `file`."""
    module = ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __cached__=None, __loader__=SourceFileLoader("__main__", file))
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    return module


def _preload(arguments: list[str]) -> str:
    """Imports modules. If torch was requested but cannot be imported, returns the reason, otherwise "".

    Failures are printed for modules after `--`, which the user chose.
    """
    at = arguments.index("--") if "--" in arguments else len(arguments)
    for module in arguments[:at]:
        try:
            import_module(module)
        except Exception as error:  # a worker that needs the module reports the error
            if module == "torch":
                return f"torch cannot be imported there ({type(error).__name__}: {error})"
    for module in arguments[at + 1 :]:
        try:
            import_module(module)
        except Exception as error:
            sys.stderr.write(f"paceline: --preload {module} is ignored: {type(error).__name__}: {error}\n")
    return ""


def _unsafe() -> str:
    """Returns the reason why this process must not be forked after its imports, or ""."""
    from paceline import linux

    torch = sys.modules.get("torch")
    devices = [] if torch is None else [torch.cuda, torch.xpu]
    if (child := os.fork()) == 0:
        os._exit(any(device._is_in_bad_fork() for device in devices))
    _, is_bad = os.waitpid(child, 0)
    if is_bad or any(device.is_initialized() for device in devices):
        return "its imports initialized a device, which forks cannot use"
    if linux.has_opened(linux.CUDA_DEVICE):  # torch notices only its own use of CUDA
        return f"its imports initialized CUDA's driver ({linux.CUDA_DEVICE} is open), which forks cannot use"
    if torch is not None and torch._C._get_privateuse1_backend_name() != "privateuseone":
        return f"its imports registered the device {torch._C._get_privateuse1_backend_name()!r}"
    threads = _threads()
    return f"it has threads after its imports ({' '.join(threads)})" if threads else ""


def _show(argv: list[str]) -> None:
    """Makes `ps` show `argv` instead of the template's arguments, truncated to the same length."""
    import ctypes

    from paceline.linux import process_fields

    with suppress(OSError, ValueError, IndexError):
        fields = process_fields("self")
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
        text = "\0".join(argv).encode(errors="surrogateescape")[: max(end - start - 1, 0)]
        if start:
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _threads() -> list[str]:
    """Returns the names of this process's other threads, except threads that a fork has just stopped."""
    names: list[str] = []
    for _ in range(_LOOKS):
        others = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
        names = []
        for thread in others:
            with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as name:
                names.append(name.read().strip())
        if not names:
            break
        time.sleep(_LOOK_S)  # a thread that has just exited may still be listed
    return names


if __name__ == "__main__":
    main()
