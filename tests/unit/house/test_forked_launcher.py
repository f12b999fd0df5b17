"""A job under `forked_launcher` has the same environment as under `launching`, apart from imported modules."""

from __future__ import annotations

import os
import signal
import sysconfig

import forked_launcher
import launching
import pytest
from launching import script

__all__ = ["script"]  # a fixture

PLACE = """
import gc, multiprocessing, os, signal, sys, threading
def changed(number):
    return signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN)
print("path", sys.path[1:], sys.argv[1:], __name__, __file__, os.getcwd())
print("names", sorted(name for name in globals() if name.startswith("__")))
print("variables", sorted({*os.environ} - {"PYTHONPATH"}))
print("handlers", [number for number in signal.valid_signals() if changed(number)], signal.getsignal(signal.SIGPIPE))
print("streams", sys.stdin.read(), sys.stdout.write_through, sys.stderr.line_buffering, sys.stdout.encoding)
print("process", multiprocessing.current_process().name, multiprocessing.get_start_method(), threading.active_count())
print("session", os.getsid(0) == os.getpid(), gc.isenabled(), os.getuid())
files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
print("descriptors", len([file for file in files if ".so" not in file]))  # libffi may keep its own file open
print("of tests", [name for name in ("launching", "world", "elastic_job", "values") if name in sys.modules])
"""


def test_a_script_finds_the_same(script, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(sysconfig.get_path("scripts"))  # as for the program `pytest`
    words = ("--nproc-per-node=2", script(PLACE), "a", "b")
    plain = launching.run("--start-method=forkserver", *words, cwd=str(tmp_path))
    forked = forked_launcher.run(*words, cwd=str(tmp_path))
    assert sorted(forked.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert forked.returncode == plain.returncode == 0, (forked.stderr, plain.stderr)
    assert forked.stderr == plain.stderr


@pytest.mark.parametrize(
    "end", ["raise SystemExit(3)", "raise ValueError('it')", "os._exit(4)", "os.kill(os.getpid(), 9)", "sys.exit('no')"]
)
def test_a_script_ends_as_it_would(script, end):
    path = script(f"import os, sys; print('begun'); {end}")
    plain, forked = launching.run("--start-method=forkserver", path), forked_launcher.run(path)
    assert (forked.returncode, forked.stdout) == (plain.returncode, plain.stdout)
    assert without_pids(forked.stderr) == without_pids(plain.stderr)


def without_pids(text: str) -> list[str]:
    return [word for word in text.split() if not word.rstrip(",").isdigit()]


def test_the_job_ends_with_its_launcher(script, tmp_path):
    path = script("import os, sys, time; open(f'{sys.argv[1]}/up', 'w').close(); time.sleep(300)")
    launcher = forked_launcher.ForkedLauncher(
        ["run", path, str(tmp_path)], launching.ENVIRONMENT, tmp_path / "out", tmp_path / "err", cwd=str(tmp_path)
    )
    launching.wait_until((tmp_path / "up").exists)
    assert len(launching.processes_in(tmp_path)) >= 2
    os.kill(launcher.pid, signal.SIGKILL)
    assert launcher.wait(60) == -signal.SIGKILL
    launching.wait_until(lambda: not launching.processes_in(tmp_path))
