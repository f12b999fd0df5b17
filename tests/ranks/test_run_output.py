"""Output destinations and failure reports: the cause is printed once and last, other failures as its consequences."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked_launcher
import pytest
from launching import ENVIRONMENT, command, run
from terminal import Terminal

SPEAKS = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
MEMORY = Path("/sys/fs/cgroup/memory")


def logs(base: Path) -> dict[str, str]:
    return {str(path.relative_to(base)): path.read_text() for path in sorted(base.rglob("*.log"))}


def test_logs_are_kept_by_run_attempt_and_rank(script, tmp_path):
    done = run("--nproc-per-node=2", "--log-dir", str(tmp_path / "d"), "--rdzv-id=job", script(SPEAKS))
    assert sorted(done.stdout.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert logs(tmp_path / "d") == {
        f"job/attempt_0/{rank}/std{name}.log": f"{name} {rank}\n" for rank in range(2) for name in ("err", "out")
    }


def test_redirects_keep_streams_off_the_console_by_rank(script, tmp_path):
    base = tmp_path / "d"
    done = run("--nproc-per-node=2", "--log-dir", str(base), "-r", "0:1,1:2", "--rdzv-id=job", script(SPEAKS))
    assert done.stdout == "[rank 1] out 1\n"
    assert "[rank 0] err 0" in done.stderr
    assert "[rank 1]" not in done.stderr
    assert logs(base) == {"job/attempt_0/0/stdout.log": "out 0\n", "job/attempt_0/1/stderr.log": "err 1\n"}


def test_tee_does_both(script, tmp_path):
    base = tmp_path / "d"
    done = run("--nproc-per-node=2", "--log-dir", str(base), "--tee", "1:1", "--rdzv-id=job", script(SPEAKS))
    assert sorted(done.stdout.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert logs(base) == {"job/attempt_0/1/stdout.log": "out 1\n"}


def test_only_chosen_ranks_are_shown(script):
    done = run("--nproc-per-node=3", "--local-ranks-filter=0,2", script(SPEAKS))
    assert sorted(done.stdout.splitlines()) == ["[rank 0] out 0", "[rank 2] out 2"]
    assert "[rank 1]" not in done.stderr


def test_lines_begin_as_a_template_says(script):
    flags = ("--nproc-per-node=2", "--role=eval", "--log-line-prefix-template=${hostname}/${role_name}${local_rank}: ")
    done = run(*flags, script(SPEAKS))
    assert sorted(done.stdout.splitlines()) == [f"{socket.gethostname()}/eval{rank}: out {rank}" for rank in range(2)]
    assert "[rank" not in done.stdout + done.stderr


def test_lines_with_chosen_words_go_to_a_file_too(script, tmp_path):
    base = tmp_path / "d"
    text = "print('loss 1'); print('other'); print('loss 2')"
    flags = ("--redirects=3", "--duplicate-stdout-filters=loss", "--rdzv-id=job")
    done = run(*flags, "--log-dir", str(base), script(text))
    assert done.stdout == ""
    assert logs(base)["job/attempt_0/filtered_stdout.log"] == "[rank 0] loss 1\n[rank 0] loss 2\n"
    assert logs(base)["job/attempt_0/0/stdout.log"] == "loss 1\nother\nloss 2\n"


def test_each_attempt_has_its_own_directory(script, tmp_path):
    done = run("--max-restarts=1", "--log-dir", str(tmp_path / "d"), "--rdzv-id=j", script("raise SystemExit(4)"))
    assert done.returncode == 1
    assert {path.split("/")[1] for path in logs(tmp_path / "d")} == {"attempt_0", "attempt_1"}
    assert f"its output is in {tmp_path}/d/j/attempt_1/0" in done.stderr


def test_lines_of_many_ranks_stay_whole(script):
    text = "import os\nfor n in range(300): print('x' * 200, n, flush=n % 7 == 0)"
    done = run("--nproc-per-node=4", script(text))
    lines = done.stdout.splitlines()
    assert len(lines) == 1200
    assert all(re.fullmatch(r"\[rank \d\] x{200} \d+", line) for line in lines)


def test_a_terminal_gets_colors(script):
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(script(SPEAKS)), stdout=theirs, stderr=theirs, env=ENVIRONMENT) as launcher:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO at its end
            while more := os.read(ours, 4096):
                shown += more
        assert launcher.wait(60) == 0
    os.close(ours)
    assert b"\x1b[36m[rank 0] \x1b[0mout 0\r\n" in shown


def test_a_bar_in_a_pipe_is_one_line(script):
    text = "import sys\nfor done in range(101): print(f'\\r{done}%', end='', file=sys.stderr)"
    assert run(script(text)).stderr == "[rank 0] 100%\n"


def test_rank_0_draws_on_a_terminal_and_others_write_lines(script):
    text = """
import os, sys, time
is_first = os.environ["RANK"] == "0"
assert os.isatty(1) == os.isatty(2) == is_first
assert os.environ.get("PAGER") == ("cat" if is_first else None)
for done in range(101):
    sys.stderr.write(f"\\r{done}%")
    if done % 25 == 0 and not is_first:
        print("line", done)
    time.sleep(0.01)
if is_first:
    print(" of", os.get_terminal_size().columns, end="")
sys.stderr.write("\\n")
"""
    with Terminal("--nproc-per-node=2", script(text), columns=70) as terminal:
        rows = terminal.end()
    assert terminal.exit_code == 0, rows
    assert sorted(rows[1:]) == [
        "",
        "[rank 0] 100% of 61",
        "[rank 1] 100%",
        *(f"[rank 1] line {done}" for done in (0, 100, 25, 50, 75)),
    ]


def test_a_terminal_without_control_sequences_gets_lines(script):
    with Terminal("--nproc-per-node=1", script(SPEAKS), term="dumb") as terminal:
        rows = terminal.end()
    assert "\x1b" not in terminal.shown
    assert {"[rank 0] out 0", "[rank 0] err 0"} <= set(rows)


def test_the_cause_stands_last_after_its_labeled_consequences(script):
    text = """
import os, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":  # before torch, whose import takes long
    if os.environ["RANK"] == "0":
        raise KeyError("once")
    time.sleep(300)
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    print("reduced", total.item(), flush=True)
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()
main()
"""
    done = forked_launcher.run("--nproc-per-node=2", "--max-restarts=1", script(text))
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] reduced 2.0" for rank in range(2)]
    assert "restart 1 of 1 in 0.25 s: rank 0 failed" in done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith("[rank")]
    consequence = [at for at, line in enumerate(told) if line.startswith("paceline: rank 0 (")]
    cause = [at for at, line in enumerate(told) if line.startswith("paceline: rank 1 failed first (")]
    assert len(cause) == 1
    assert all("a consequence: " in told[at] and at > cause[0] for at in consequence)
    assert told[cause[0]].endswith("exit code 1): ValueError: the cause; its traceback is above")
    assert "bootstrap" not in done.stderr
    assert done.stderr.count('raise ValueError("the cause")') == 1, "where it happened, and not again"


def test_a_traceback_out_of_view_is_printed_again(script):
    text = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("".join(f"line {number}\\n" for number in range(100))))
raise ValueError("the cause")
"""
    done = run("--nproc-per-node=1", script(text))
    assert done.stderr.splitlines()[-1] == "ValueError: the cause"
    assert done.stderr.count('raise ValueError("the cause")') == 2, "where it happened, and at the end"


@pytest.mark.parametrize(
    ("end", "code", "named"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "killed by SIGKILL"),
        ("os.abort()", -6, "killed by SIGABRT"),
        ("os._exit(9)", 9, "exit code 9"),
        ("sys.exit(7)", 7, "exit code 7"),
    ],
)
def test_the_end_of_a_worker_is_named_and_recorded(script, tmp_path, end, code, named):
    done = run("--log-dir", str(tmp_path), "--rdzv-id=j", script(f"import os, signal, sys; {end}"))
    assert done.returncode == 1
    assert named in done.stderr
    kept = json.loads((tmp_path / "j/attempt_0/0/error.json").read_text())
    assert (kept["rank"], kept["exit_code"], kept["how"]) == (0, code, named)


@pytest.fixture
def small_memory():
    """Yields the directory of a cgroup that limits a launcher's memory to 300 MiB."""
    directory = MEMORY / f"paceline-test-{os.getpid()}"
    try:
        directory.mkdir()
        (directory / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield directory
    with contextlib.suppress(OSError):
        directory.rmdir()


def test_a_worker_that_the_kernel_kills_for_memory_is_recognized(small_memory, script):
    text = """
import os, time
held = []
while os.environ["RANK"] == "1":
    held.append(bytearray(os.urandom(1 << 20) * 8))
time.sleep(300)
"""
    enter = f"echo $$ > {small_memory}/cgroup.procs && exec "
    words = " ".join(command("--nproc-per-node=2", script(text)))
    done = subprocess.run(["sh", "-c", enter + words], capture_output=True, text=True, timeout=110, env=ENVIRONMENT)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.search(r"rank 1 failed first \(.*killed by the kernel, out of memory\): it had used up to \d+ MiB", last)
    assert "the cgroup's limit is 300 MiB for all ranks together" in last
    assert "Use smaller batches" in last


def test_without_a_reader_of_its_output_the_job_ends(script):
    text = "import time\nwhile True: print('x' * 1000)"
    launcher = subprocess.Popen(
        command(script(text)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    try:
        launcher.stdout.read(5000)
        time.sleep(0.5)  # until the pipe is full, because no process reads it
        launcher.terminate()
        assert launcher.wait(25) == 1
    finally:
        launcher.kill()
        launcher.stdout.close()
        launcher.wait()


def test_python_is_the_one_of_the_launcher(script):
    assert run(script("import sys; print(sys.executable)")).stdout == f"[rank 0] {sys.executable}\n"


def test_a_script_finds_no_names_of_the_launcher(script):
    done = run(script("print([name for name in globals() if not name.startswith('__')])"))
    assert done.stdout == "[rank 0] []\n"


def test_a_script_may_redefine_names_of_modules(script):
    done = run(script("import sys, os\nsys = os = None\nraise ValueError('boom')"))
    assert "[rank 0] ValueError: boom" in done.stderr and "excepthook" not in done.stderr


def test_a_crash_in_native_code_leaves_the_python_stack(script):
    done = run(script("import ctypes\ndef fall(): ctypes.string_at(0)\nfall()"))
    assert done.returncode == 1
    assert "killed by SIGSEGV) at script.py:2; look at its output above" in done.stderr
    assert re.search(r"\[rank 0\]   File .*script.py.*, line 2 in fall", done.stderr)


def test_a_crash_has_its_line_if_stderr_is_only_in_a_file(script, tmp_path):
    text = "import ctypes\ndef fall(): ctypes.string_at(0)\nfall()"
    done = run("-r", "2", "--log-dir", str(tmp_path), script(text))
    assert "killed by SIGSEGV) at script.py:2; look at its output, where Python" in done.stderr


# This crash imitates torch's threads, which may crash at exit if destroy_process_group() was not called.
CRASHES_AT_EXIT = """
import os
class Last:
    def __del__(self, crash=os.abort):
        crash()
last = Last()
print("done")
"""


def test_a_crash_after_the_end_of_the_script_is_called_that(script):
    done = run(script(CRASHES_AT_EXIT))
    assert done.returncode == 1
    assert "done" in done.stdout
    assert re.search(
        r"rank 0 failed first \(.*SIGABRT\) after its script had ended.*destroy_process_group", done.stderr
    )


def test_a_crash_in_the_script_is_not_called_one_at_exit(script):
    assert "after its script had ended" not in run(script("import os; os.abort()")).stderr


def test_workers_keep_their_usual_limit_of_descriptors(script):
    text = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    words = " ".join(command("--nproc-per-node=40", script(text)))
    shell = f"ulimit -S -n 256; exec {words}"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=110, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {"256"}


def test_a_long_temporary_directory_is_no_obstacle(script, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    done = run(script(SPEAKS), env={**ENVIRONMENT, "TMPDIR": str(deep)})
    assert done.stdout == "[rank 0] out 0\n", done.stderr
