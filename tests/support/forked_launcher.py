"""Runs `paceline run` in a fork of a process that has imported torch, so that jobs do not repeat the imports.

The launcher is the real one. Its template is a fork of the launcher, not a new interpreter, so the required modules are
already imported. The template forks the workers, even those for which the launcher would otherwise start an
interpreter. Tests that use `launching.run` cover the real startup of a launcher, a template and such workers.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import launching
from forking import begin, context, start_server
from hosts.namespaces import Host, enter

from paceline.interop import torch_backend
from paceline.linux import die_with_parent

_TESTS = Path(__file__).parents[1]
_FOLDERS_OF_TESTS = tuple(f"{_TESTS.parent}/{name}/" for name in ("tests", "bench", "release", "docs"))
_DESCRIPTORS = 4096
_main_process = multiprocessing.current_process()  # the fork server's own, because it imports this module first


class ForkedLauncher:
    """A running launcher with the methods of `subprocess.Popen`.

    Args:
        words: The command's words after `paceline`, such as `run`.
        env: The complete environment.
        stdout: The file for standard output.
        stderr: The file for standard error.
        says: The text for standard input, empty by default.
        host: The host to run on, or None for this machine itself.
        cwd: The working directory.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        says: str = "",
        host: Host | None = None,
        cwd: str | None = None,
    ) -> None:
        for path in (stdout, stderr):
            path.touch()  # positioned at the start for reading
        start_server()
        place = host, cwd or os.getcwd()
        words = _with_forked_workers(words)
        self._process = context.Process(target=_launch, args=(words, dict(env), (stdout, stderr), says, place))
        self._process.start()
        self.args = words

    @property
    def pid(self) -> int:
        return self._process.pid or -1

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(shlex.join(self.args), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    *arguments: str,
    timeout_s: float = 110,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    says: str = "",
) -> subprocess.CompletedProcess[str]:
    """Does the same as `launching.run`; `says` is the text for standard input."""
    return run_command("run", *arguments, timeout_s=timeout_s, env=env, cwd=cwd, says=says)


def run_command(
    *words: str,
    timeout_s: float = 110,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    says: str = "",
) -> subprocess.CompletedProcess[str]:
    """Runs any of `paceline`'s commands and waits for its exit."""
    with TemporaryDirectory(prefix="paceline-") as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        launcher = ForkedLauncher(words, launching.ENVIRONMENT if env is None else env, out, err, says, cwd=cwd)
        try:
            code = launcher.wait(timeout_s)
        finally:
            launcher.kill()  # also ends the processes that the launcher has started
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def _with_forked_workers(words: Sequence[str]) -> list[str]:
    command, *rest = words
    names = {word.partition("=")[0] for word in rest}
    if command not in ("run", "join") or names & {"--no-python", "--hosts", "--start-method"}:
        return list(words)
    at = 1 if command == "join" else 0  # after the token
    return [command, *rest[:at], "--start-method=forkserver", *rest[at:]]


def _launch(
    words: Sequence[str],
    env: Mapping[str, str],
    output: tuple[Path, Path],
    says: str,
    place: tuple[Host | None, str],
) -> None:
    host, directory = place
    if host is not None:
        enter(host)
    begin()
    die_with_parent(os.getppid())
    os.setsid()
    os.chdir(directory)
    reading, writing = os.pipe()
    os.write(writing, says.encode())
    os.dup2(reading, 0)
    for number, path in enumerate(output, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
    _resemble_new_interpreter(env, ())
    sys.argv = [f"{Path(launching.__file__).parent}/paceline", *words]
    from paceline.cli.main import main
    from paceline.operate.launch.workers import forker, template

    template._show([sys.executable, "-m", "paceline", *words])
    forker.subprocess = _ForkingSubprocess()  # type: ignore[assignment]
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    _end(code)


class _ForkingSubprocess:
    """Replaces the module `subprocess`; a template is started as a fork."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: N802
        from paceline.operate.launch.workers import template

        if words[1] != template.__file__:
            return subprocess.Popen(words, **options)
        # `_be_template` never returns, so no program is executed. The caller waits until the template closes all
        # descriptors.
        return subprocess.Popen(
            words, preexec_fn=lambda: _be_template(words, options["env"], options["pass_fds"]), **options
        )


def _be_template(words: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> None:
    import torch

    from paceline.operate.launch.workers import template

    code: object = 1
    try:
        _resemble_new_interpreter(env, pass_fds)
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
        _load_plug_in_again()
        sys.argv = list(words[1:])
        sys.path.insert(0, os.path.dirname(template.__file__))
        template.main()
        code = 0
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    _end(code)


def _resemble_new_interpreter(env: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Resets what a new interpreter would not inherit: descriptors, signal handlers, and the state of modules."""
    for first, last in zip([2, *sorted(descriptors)], [*sorted(descriptors), _DESCRIPTORS], strict=True):
        os.closerange(first + 1, last)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    faulthandler.disable()
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    is_buffered = "PYTHONUNBUFFERED" not in env
    sys.stdout = sys.__stdout__ = _stream(1, is_buffered, "strict")
    sys.stderr = sys.__stderr__ = _stream(2, is_buffered, "backslashreplace")
    sys.stderr.reconfigure(line_buffering=is_buffered)
    given = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    own = [*given, "", str(_TESTS.parent), sysconfig.get_path("scripts")]  # of `python -m pytest` and `pytest`
    sys.path[:] = given + [entry for entry in sys.path if entry not in own and not _is_of_tests(entry)]
    for name, module in list(sys.modules.items()):
        if name != __name__ and _is_of_tests(getattr(module, "__file__", None) or "/"):
            del sys.modules[name]
    sys.modules.pop("__mp_main__", None)
    util._finalizer_registry.clear()
    process._current_process = _main_process
    _main_process.name = "MainProcess"
    process._parent_process = None
    process._children = set()
    multiprocessing.context._default_context._actual_context = None
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    forkserver._forkserver.__init__()
    gc.enable()


def _stream(number: int, is_buffered: bool, errors: str) -> io.TextIOWrapper:
    raw: Any = io.FileIO(number, "w", closefd=False)
    encoding = sys.getfilesystemencoding()
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if is_buffered else raw, encoding, errors, write_through=not is_buffered
    )


def _load_plug_in_again() -> None:
    """Registers the plug-in as torch does during its import, because the registration depends on the environment."""
    from torch.distributed import Backend

    Backend.backend_list.remove("paceline")
    del Backend.PACELINE
    if (other := sys.modules.get("torch.distributed._dist2")) is not None:
        del other._BACKENDS["paceline"]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        torch_backend.register()


def _is_of_tests(path: str) -> bool:
    """Returns True for the folders that tests add to `sys.path`, and for modules in them."""
    return f"{path}/".startswith(_FOLDERS_OF_TESTS)


def _end(code: object) -> None:
    """Exits like an interpreter, but does not spend time freeing all objects."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code or 0)
