"""`paceline run` with unusual or broken streams, directories, names, output or workers."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys

import pytest
from launching import ENVIRONMENT, command, processes_with, run, wait_until

from paceline.operate.launch.command import explain_os_error

SPEAKS = "print('here')"


def shell(line: str, *arguments: str, cwd: str | None = None, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `line`, in which "$@" is `paceline run` with the arguments."""
    words = ["bash", "-c", line, "bash", *command(*arguments)]
    return subprocess.run(words, capture_output=True, timeout=60, cwd=cwd, env={**ENVIRONMENT, **variables})


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_of_the_launcher_are_no_obstacle(script, tmp_path, closed):
    done = shell(f'"$@" {closed}', script("open(__import__('sys').argv[1], 'w')"), str(tmp_path / "ran"))
    assert (done.returncode, (tmp_path / "ran").exists()) == (0, True), done.stderr


def test_a_reader_that_goes_away_ends_nothing(script):
    done = shell('"$@" | head -n 1; exit ${PIPESTATUS[0]}', script("for n in range(20000): print('line', n)"))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[rank 0] line 0\n", b"")


def test_any_output_and_what_a_worker_left_behind(script):
    text = """
import os, sys, time
os.write(1, bytes(range(256)) + b"\\n" + b"y" * 200_000)
sys.stdout.flush()
if os.fork() == 0:  # a daemon, which keeps stdout open
    os.setsid()
    time.sleep(300)
os.close(2)
raise ValueError("the cause")
"""
    mark = f"HOSTILE={os.getpid()}.{id(script)}"
    name, _, value = mark.partition("=")
    done = shell('"$@"', script(text), **{name: value})
    assert done.returncode == 1
    assert b"y" * 60_000 in done.stdout
    assert bytes(range(14, 256)) in done.stdout
    assert done.stderr.endswith(b"ValueError: the cause\n"), "though the worker had closed its stderr"
    wait_until(lambda: not processes_with(mark))


def test_names_that_the_locale_cannot_spell(script):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell('"$@"', script("raise ValueError('ü')", "skript-ü.py"), **plain)
    assert done.returncode == 1
    assert b"ValueError: \xc3\xbc\n" in done.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--log-dir=file"], "file/j/attempt_0/0 cannot hold the workers' output (Not a directory); set --log-dir"),
        (["missing.py"], "missing.py does not exist"),
        (["-m", "missing"], "No module named missing"),
        (["--no-python", "./file"], "./file cannot be executed (Permission denied)"),
    ],
)
def test_what_cannot_be_run_or_kept_is_named(script, tmp_path, flags, complaint):
    script("", "file")
    done = run("--rdzv-id=j", *flags, script(SPEAKS), cwd=str(tmp_path))
    assert done.returncode in (1, 2)
    assert complaint in done.stderr
    assert "here" not in done.stdout


def test_a_directory_that_was_removed_is_named(script, tmp_path):
    script(SPEAKS)
    done = shell('mkdir gone; cd gone; rmdir ../gone; "$@"', "../script.py", cwd=str(tmp_path))
    assert done.returncode == 2
    assert b"the current directory has been removed" in done.stderr


def test_a_worker_that_somebody_else_interrupts_has_failed(script):
    done = run(script("import os, signal; os.kill(os.getpid(), signal.SIGINT)"))
    assert done.returncode == 1
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_ctrl_c_while_the_guards_are_forked_is_heard(tmp_path):
    code = """
import os, signal, sys
from paceline.operate.launch.workers.cleanup import CleanupGuard
signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    CleanupGuard(sys.argv[1], sys.argv[1], None)
except KeyboardInterrupt:
    sys.exit(130)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == 130, done.stderr.decode()


# Sends Ctrl-C while the callback of an import lock runs, after the module argv[1] has been imported. CPython discards
# exceptions that are raised there.
DURING_AN_IMPORT = """
import os, runpy, signal, sys
handler, module, name, *words = sys.argv[1:]
signal.signal(signal.SIGINT, getattr(signal, handler))
def interrupt(frame, event, argument):
    code = frame.f_code
    if code.co_name == "cb" and "importlib" in code.co_filename and module in sys.modules:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)
sys.argv[1:] = words
sys.setprofile(interrupt)
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


def interrupted(handler: str, module: str, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-c", DURING_AN_IMPORT, handler, module, name, *words]
    return subprocess.run(code, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("paceline.operate.launch.command", "paceline", ["run"]),
        ("paceline.operate.launch.workers.cleanup", "paceline", ["run"]),
        ("paceline.operate.launch.worker_group_launcher", "paceline", ["run", "--elastic"]),
        ("paceline.operate.launch.command", "paceline.launch", []),
    ],
)
def test_one_ctrl_c_ends_a_launcher_that_is_importing(script, module, name, words):
    done = interrupted("default_int_handler", module, name, *words, script(SPEAKS))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_launcher_whose_parent_ignores_ctrl_c_ignores_it_too(script):
    done = interrupted("SIG_IGN", "paceline.operate.launch.job", "paceline", "run", script(SPEAKS))
    assert (done.returncode, done.stdout) == (0, "[rank 0] here\n"), done.stderr


def test_a_launcher_without_descriptors_says_what_it_needs(script):
    words = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", *command("--nproc-per-node=2", script("print(1)"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, env=ENVIRONMENT)
    assert done.returncode == 1
    assert re.search(
        r"^paceline run: the launcher \(pid \d+\): out of file descriptors \(24 of 24\), needed for its workers, about "
        r"8 for each\. Raise the limit \(ulimit -n",
        done.stderr,
        re.MULTILINE,
    ), done.stderr


def test_a_system_without_proc_is_told(monkeypatch):
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/self/stat")
    assert explain_os_error(missing) is missing, "it is there"
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/proc/self/stat")
    assert re.match(
        r"/proc is not mounted, .*: '/proc/self/stat'\); .*Mount it \(mount -t proc", str(explain_os_error(missing))
    )


FAILS_ALIKE = """
import os, sys, time
from pathlib import Path
rank, here = os.environ["RANK"], Path(sys.argv[1])
(here / rank).touch()
while len(list(here.iterdir())) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
raise ValueError(f"rank {rank}: port {4000 + int(rank)} cannot be reached")
"""


def test_a_failure_of_all_ranks_is_told_once(script, tmp_path):
    (tmp_path / "here").mkdir()
    done = run("--nproc-per-node=4", script(FAILS_ALIKE), str(tmp_path / "here"))
    assert done.returncode == 1
    (printer,) = re.findall(r"^\[rank (\d)\] ValueError: rank \1: port", done.stderr, re.MULTILINE)
    told = r"^paceline: rank (\d) failed first \(.*, exit code 1\): ValueError: rank \1: port .* reached; (.*)$"
    first, where = re.search(told, done.stderr, re.MULTILINE).groups()
    assert where == ("its traceback is above" if first == printer else f"see rank {printer}'s traceback above")
    assert done.stderr.count("Traceback") == 1
    others = re.search(r"^paceline: ranks ([\d, -]+) failed in the same way$", done.stderr, re.MULTILINE)[1]
    numbers = [int(each) for each in re.findall(r"\d", others)]
    assert int(first) not in numbers and len(numbers) >= 2
