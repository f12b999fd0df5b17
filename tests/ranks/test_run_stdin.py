"""The process that reads the launcher's stdin from a pipe, a file or a terminal; prompts, debuggers and Ctrl-C."""

from __future__ import annotations

import os
import select
import shlex
import subprocess

import pytest
from launching import ENVIRONMENT, command, state_of, wait_until
from terminal import Terminal

READS = "import os, sys; print(os.environ['RANK'], 'read', repr(sys.stdin.read()))"


def piped(*arguments: str, given: str = "typed", cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), input=given, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=cwd
    )


@pytest.mark.parametrize(
    ("flags", "read"),
    [
        ([], ["typed", ""]),
        (["--stdin=1"], ["", "typed"]),
        (["--stdin=none"], ["", ""]),
        (["--start-method=fork"], ["typed", ""]),
    ],
)
def test_one_rank_reads_the_launchers_stdin(script, flags, read):
    done = piped("--nproc-per-node=2", *flags, script(READS))
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {rank} read {read[rank]!r}" for rank in range(2)]


RUNS = """
import os, sys, words
print(os.environ["RANK"], sys.argv, __name__, "__file__" in globals(), words.GREETING, repr(sys.stdin.read()))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("it")
"""


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_every_worker_runs_a_script_that_is_read_from_stdin(tmp_path, name, method):
    (tmp_path / "words.py").write_text("GREETING = 'hello'")
    words = ("--nproc-per-node=2", "--max-restarts=1", f"--start-method={method}", name, "--lr", "1")
    done = piped(*words, given=RUNS, cwd=str(tmp_path))
    assert done.returncode == 0, done.stderr
    after_restart = [f"[rank {rank}] {rank} {[name, '--lr', '1']} __main__ False hello ''" for rank in range(2)]
    assert set(after_restart) <= set(done.stdout.splitlines())
    assert '"<stdin>", line 5' in done.stderr and "ValueError: it" in done.stderr


def test_a_program_that_is_no_python_reads_it_too():
    assert piped("--no-python", "cat", given="one\ntwo\n").stdout == "[rank 0] one\n[rank 0] two\n"


def test_a_rank_for_stdin_that_is_not_there_is_refused(script):
    done = piped("--nproc-per-node=2", "--stdin=2", script(READS))
    assert done.returncode == 2
    assert done.stderr == "paceline run: --stdin 2 is too large: the ranks are 0 to 1\n"


def test_a_restarted_worker_reads_on(script):
    text = """
import os
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(attempt, os.read(0, 4).decode())
raise SystemExit(attempt == "0")
"""
    done = piped("--max-restarts=1", script(text), given="onetwo..")
    assert done.stdout.splitlines() == ["[rank 0] 0 onet", "[rank 0] 1 wo.."]


def test_a_prompt_is_shown_in_a_pipe_too(script):
    text = "print('hello', input('name? '))"
    with subprocess.Popen(
        command(script(text)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=ENVIRONMENT
    ) as launcher:
        shown = b""
        while len(shown) < len(b"[rank 0] name? "):
            assert select.select([launcher.stdout], [], [], 60)[0], "no prompt"
            shown += os.read(launcher.stdout.fileno(), 100)
        rest, _ = launcher.communicate(b"Anna\n", timeout=60)
    assert shown + rest == b"[rank 0] name? [rank 0] hello Anna\n"


def test_a_prompt_is_shown_and_answered(script):
    with Terminal(script("print('hello', input('name? '))")) as terminal:
        terminal.wait_for("name? ")
        terminal.type("Anna\r")
        assert "[rank 0] hello Anna" in terminal.end()


def test_a_line_can_be_edited(script):
    pytest.importorskip("readline")
    text = "import readline\nprint('hello', input('name? '))"
    with Terminal(script(text)) as terminal:
        terminal.wait_for("name? ")
        terminal.type("Ana\x1b[Dn\r")  # the sequence moves the cursor to the left
        assert "[rank 0] hello Anna" in terminal.end()


DEBUGGED = """
import os
x = 41
if os.environ["RANK"] == "0":
    breakpoint()
print("x", x)
"""


def test_ctrl_c_at_the_prompt_of_the_debugger_ends_nothing(script):
    with Terminal("--nproc-per-node=2", script(DEBUGGED)) as terminal:
        terminal.wait_for("(Pdb) ")
        terminal.interrupt()
        terminal.wait_for("--KeyboardInterrupt--")
        terminal.type("x = 42\r")
        terminal.wait_for("(Pdb) ")
        terminal.type("c\r")
        rows = terminal.end()
    assert terminal.exit_code == 0
    assert {"[rank 0] x 42", "[rank 1] x 41"} <= set(rows)


def test_ctrl_c_at_a_prompt_of_the_script_ends_the_job(script):
    text = "import os, time\nif os.environ['RANK'] == '0': input('name? ')\ntime.sleep(60)"
    with Terminal("--nproc-per-node=2", "--max-restarts=3", script(text)) as terminal:
        terminal.wait_for("name? ")
        terminal.interrupt()
        terminal.end()
    assert terminal.exit_code == 1
    assert "paceline: SIGINT: passed on to 1 worker," in terminal.shown


def test_ctrl_c_elsewhere_ends_the_job(script):
    with Terminal("--nproc-per-node=2", script("import time; print('there'); time.sleep(60)")) as terminal:
        terminal.wait_for("there")
        terminal.interrupt()
        terminal.end()
    assert terminal.exit_code == 1
    assert "paceline: SIGINT: passed on to 2 workers" in terminal.shown


def test_breakpoint_does_nothing_on_ranks_without_stdin(script):
    with Terminal("--nproc-per-node=2", script("x = 41\nbreakpoint()\nprint('x', x)")) as terminal:
        terminal.wait_for("(Pdb) ")
        terminal.type("c\r")
        rows = terminal.end()
    assert terminal.exit_code == 0
    assert {"[rank 0] x 41", "[rank 1] x 41"} <= set(rows)
    assert "breakpoint() does nothing on rank 1, because rank 0 reads stdin" in "".join(rows)


def test_the_terminal_is_as_before_when_a_reader_is_killed(script, tmp_path):
    pytest.importorskip("readline")
    text = """
import os, readline, sys, time
if os.environ["RANK"] == "0":
    input("name? ")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os._exit(3)
"""
    with Terminal("--nproc-per-node=2", script(text), str(tmp_path / "fail")) as terminal:
        terminal.wait_for("name? ")
        wait_until(terminal.edits_lines)
        (tmp_path / "fail").touch()
        terminal.wait_for("rank 1 failed first")
        wait_until(lambda: not terminal.edits_lines())


STOPS = """
import os, sys, time
if os.environ["RANK"] == "0":
    open(sys.argv[1], "w").write(str(os.getpid()))
    print("started", flush=True)
    print("hello", input("name? "))
"""


def test_ctrl_z_stops_the_workers_with_the_launcher(script, tmp_path):
    told = tmp_path / "pid"
    with Terminal(words=["sh", "-i"]) as terminal:
        terminal.type(f"{shlex.join(command(script(STOPS), str(told)))}\r")
        terminal.wait_for("started")
        terminal.wait_for("name? ")
        worker = int(told.read_text())
        terminal.type("\x1a")
        terminal.wait_for("Stopped")
        wait_until(lambda: state_of(worker) == "T")
        terminal.type("bg\r")
        terminal.press_enter_until("Stopped")  # the job stops again, because it reads the terminal
        wait_until(lambda: state_of(worker) == "T")
        terminal.type("fg\r")
        terminal.wait_for("name? ")
        terminal.type("Anna\r")
        terminal.wait_for("hello Anna")
        terminal.wait_for("$ ")
        terminal.type("exit\r")
        terminal.end()


def test_a_job_in_the_background_takes_no_input(script):
    with Terminal(words=["sh", "-i"]) as terminal:
        terminal.type(f"{shlex.join(command(script(READS)))} &\r")
        terminal.wait_for("0 read ''")
        terminal.type("exit\r")
        terminal.end()
