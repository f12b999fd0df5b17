"""Entry program for each worker: `python bootstrap.py LAUNCHER_PID [-m|--path|--exec|--text FILE] SCRIPT ARGS...`.

The program runs the script as `python SCRIPT` does, and announces an uncaught exception to the launcher. If the
launcher dies, the worker is killed as well. To keep the startup of workers fast, nothing is imported from the package.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, TracebackType


def run(arguments: list[str]) -> None:
    """Runs the worker's script in the module `__main__`."""
    launcher, *rest = arguments
    die_with_parent(int(launcher))
    _join_cgroup(os.environ.pop("PACELINE_CGROUP", None))
    if rest[0] == "--exec":
        try:
            os.execvp(rest[1], rest[1:])
        except OSError as error:
            sys.exit(
                f"paceline: {rest[1]} cannot be executed ({error.strerror}); with --no-python it must be a program"
            )
    if (channel := os.environ.get("PACELINE_ELASTIC_FD")) is not None:
        os.set_inheritable(int(channel), False)  # the script's child processes must not write to this channel
    error_file = os.environ["PACELINE_ERROR_FILE"]
    uncaught = _ExceptionRecorder(error_file)
    _print_uncaught()
    _record_exit(error_file)
    _record_thread_errors(error_file)
    import faulthandler

    _prepare_stdin()
    faulthandler.enable()  # prints the Python stack if the worker crashes in native code
    offer_stack()
    try:
        try:
            _run_script(rest)
        except SystemExit as error:
            uncaught.record_exit(error)
            raise
        except BaseException as error:
            uncaught.record(error)
            raise
    except SystemExit:
        raise
    except BaseException as error:  # e.g. from a signal handler that runs as `record` starts
        uncaught.record(error)
        raise


def _run_script(rest: list[str]) -> None:
    """Runs the script, module or path given in the arguments, in a namespace without any names from this file."""
    kind = rest.pop(0) if rest[0] in ("-m", "--path", "--text") else ""
    if kind == "--text":
        with open(rest.pop(0), "rb") as file:
            code = compile(file.read(), "<stdin>", "exec")
        sys.argv = rest
        _replace_own_folder("")  # as for `python -`
        _run_code(code, {"__doc__": None})
        return
    sys.argv = rest
    script = rest[0]
    if kind == "-m":
        import runpy

        _replace_own_folder(os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not kind and not os.path.isabs(script):  # keeps __file__ valid after os.chdir, as in Python 3.9 and later
        script = os.path.join(os.getcwd(), script)
    if kind or _holds_modules(script):
        import runpy

        _replace_own_folder(None)
        runpy.run_path(script, run_name="__main__")
        return
    _replace_own_folder(os.path.dirname(os.path.abspath(script)))
    with open(script, "rb") as file:
        code = _code_of(file.read(), script)
    _run_code(code, {"__file__": script, "__doc__": None})


def _replace_own_folder(folder: str | None) -> None:
    """Replaces this file's folder, the first entry of `sys.path`, by the script's, or removes it if `folder` is None.

    With PYTHONSAFEPATH, Python adds neither of them, and the first entry is from PYTHONPATH.
    """
    if getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        return
    sys.path[:1] = [] if folder is None else [folder]


def _run_code(code: CodeType, names: dict[str, object]) -> None:
    """Runs code in the module `__main__`, which then contains `names` but no names from this file.

    Functions in this file that run later must therefore import the modules that they use.
    """
    namespace = sys.modules["__main__"].__dict__
    for name in [name for name in namespace if not name.startswith("__") or name == "__file__"]:
        del namespace[name]
    namespace.update(names)
    exec(code, namespace)


def _holds_modules(script: str) -> bool:
    """Returns True if the script is a directory or a zip file that contains a module `__main__`."""
    for hook in sys.path_hooks:
        try:
            hook(script)
            return True
        except ImportError:
            pass
    return False


def _code_of(content: bytes, script: str) -> CodeType:
    if not script.endswith(".pyc"):
        return compile(content, script, "exec")
    import marshal
    from importlib.util import MAGIC_NUMBER

    if content[:4] != MAGIC_NUMBER:
        here = sys.version.split()[0]
        sys.exit(f"paceline: {script} is not compiled code of this version of Python ({here})")
    code: CodeType = marshal.loads(content[16:])
    return code


def die_with_parent(parent: int) -> None:
    """Same as `paceline.linux.die_with_parent`, but without that module's imports."""
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:
        os.kill(os.getpid(), 9)


def _prepare_stdin() -> None:
    """Enables line editing in `input` on the rank that reads stdin, and disables `breakpoint()` on other ranks.

    A line editor echoes typed text on stdout, where the launcher receives it. Without stdin, the debugger would
    terminate the job.
    """
    reader, rank = os.environ.get("PACELINE_STDIN", "none"), os.environ["RANK"]
    if reader == rank and os.isatty(0) and os.isatty(1):
        from contextlib import suppress

        with suppress(ImportError):
            import readline  # noqa: F401
    if reader in ("none", rank) or "PYTHONBREAKPOINT" in os.environ:
        return

    def skip(*_: object, **__: object) -> None:
        import sys  # see `_run_code`

        sys.stderr.write(
            f"paceline: breakpoint() does nothing on rank {rank}, because rank {reader} reads stdin; use "
            f"paceline.breakpoint({rank}), or start with --stdin {rank}\n"
        )

    sys.breakpointhook = skip


def offer_stack() -> None:
    """Enables the launcher to capture this process's Python stack with a signal (see `diagnosis/worker_process.py`).

    Child programs inherit neither the file nor the handler.
    """
    import faulthandler
    import signal

    try:
        file = _new_file(f"paceline-stack-{os.getpid()}")
        appending = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.close(file)
    except OSError:  # memory files are unsupported, or no descriptors are left
        return
    faulthandler.register(signal.SIGRTMAX - 7, appending, all_threads=False, chain=False)


def _new_file(name: str) -> int:
    """Same as `paceline.linux.memfd_create`, but without that module's imports."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import ctypes

    file = int(ctypes.CDLL(None).memfd_create(name.encode(), 1))
    if file < 0:
        raise OSError(f"{name} cannot be created")
    return file


def _join_cgroup(directory: str | None) -> None:
    """Moves this process into the job's cgroup, if there is one and the kernel permits it."""
    if directory is not None:
        try:
            with open(f"{directory}/cgroup.procs", "w") as members:
                members.write("0")
        except OSError:
            pass


def _record_exit(path: str) -> None:
    """Registers the last exit handler. It records that the script has ended, so later crashes are not blamed on it."""
    import atexit
    from os import getpid  # see `_run_code`

    worker = getpid()

    def record_end() -> None:
        if getpid() == worker:
            try:
                with open(f"{path}.at-exit", "w"):
                    pass
            except OSError:
                pass

    atexit.register(record_end)


class _ExceptionRecorder:
    """Records an uncaught exception in the script, and announces it to the launcher immediately.

    The process itself may take seconds to exit because of threads, exit handlers and memory to release. Modules are
    imported only after an exception.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._package = _package()
        self._worker = os.getpid()
        self._is_recorded = False

    def record(self, error: BaseException) -> None:
        """Records the exception, unless one is recorded already or this process is a fork of the worker."""
        if not self._may_record():
            return
        for _ in range(2):  # the script's signal handler may raise an exception here, as a DataLoader's does
            try:
                from paceline.operate.launch.failures import record_uncaught

                record_uncaught(self._path, error)
                self._is_recorded = True
                return
            except Exception:  # the script's own exception must always propagate
                pass

    def record_exit(self, error: SystemExit) -> None:
        """Records where, and with which message, the script raised SystemExit, as `sys.exit(3)` does."""
        if not self._may_record():
            return
        try:
            from paceline.operate.launch.failures import write_exit

            write_exit(self._path, error)
        except Exception:  # e.g. the disk is full; the exit code is known in any case
            pass

    def _may_record(self) -> bool:
        import sys  # see `_run_code`
        from os import getpid

        if self._is_recorded or getpid() != self._worker:
            return False
        sys.path.insert(0, self._package)
        return True


def _print_uncaught() -> None:
    """Installs a hook that prints uncaught exceptions in the launcher's format. Only the hook imports modules."""
    package = _package()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import sys  # see `_run_code`

        sys.path.insert(0, package)
        try:
            from paceline.operate.launch.failures import print_uncaught
        except Exception:  # e.g. a file in the script's directory has the same name as a module in the standard library
            sys.__excepthook__(kind, error, trace)
        else:
            print_uncaught(kind, error, trace)

    sys.excepthook = hook


def _record_thread_errors(path: str) -> None:
    """Records the first exception that ends a thread, because the main thread may wait for the thread's results."""
    import threading

    package, worker, print_error = _package(), os.getpid(), threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        import sys  # see `_run_code`
        from os import getpid

        print_error(error)
        if error.exc_type is SystemExit or error.exc_value is None or getpid() != worker:
            return
        sys.path.insert(0, package)
        try:
            from paceline.operate.launch.failures import write_thread_error

            write_thread_error(path, error.exc_type, error.exc_value, error.exc_traceback)
        except Exception:  # the exception has been printed in any case
            pass

    threading.excepthook = hook


def _package() -> str:
    """Returns the directory that contains the package `paceline`, five levels above this file."""
    return os.path.abspath(__file__).rsplit(os.sep, 5)[0] or os.sep


if __name__ == "__main__":
    run(sys.argv[1:])
