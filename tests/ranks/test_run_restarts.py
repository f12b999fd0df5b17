"""Failed workers are restarted, and workers of an earlier generation are rejected everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from launching import ENVIRONMENT, MEET, command, run

FAILS_TWICE = """
import os, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
if os.environ["RANK"] == "1" and attempt < 2:
    raise ValueError(f"attempt {attempt}")
"""


def test_failed_workers_are_started_anew_together(script):
    started_s = time.monotonic()
    done = run("--nproc-per-node=2", "--max-restarts=2", script(FAILS_TWICE))
    assert done.returncode == 0, done.stderr
    expected = [f"[rank {rank}] attempt {attempt} of 2" for attempt in range(3) for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert "restart 1 of 2 in 0.25 s: rank 1 failed" in done.stderr
    assert "restart 2 of 2 in 0.5 s: rank 1 failed" in done.stderr
    assert time.monotonic() - started_s > 0.75


def test_with_no_restart_left_the_last_failure_is_told(script):
    done = run("--nproc-per-node=2", "--max-restarts=1", script(FAILS_TWICE))
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("paceline: rank 1 failed first") :]
    assert last.splitlines()[0].endswith("ValueError: attempt 1; its traceback is above")


STALE = """
import os, socket, sys, time
from datetime import timedelta
from pathlib import Path
from paceline.errors import PacelineError
from paceline.comm.security.secret import job_secret
from paceline.comm.store.remote_store import connect_unix
path = Path(sys.argv[1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    path.write_bytes(job_secret())
    raise SystemExit(1)
served = os.environ["PACELINE_STORE"].removeprefix("unix:")
connect_unix(served, job_secret(), timedelta(seconds=60))
try:
    connect_unix(served, path.read_bytes(), timedelta(seconds=60))
except PacelineError as error:
    print("refused:", type(error).__name__)
"""


def test_the_secret_of_an_older_generation_opens_nothing(script, tmp_path):
    done = run("--max-restarts=1", script(STALE), str(tmp_path / "secret"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[rank 0] refused: ")


def test_what_an_older_generation_left_running_is_ended(script, tmp_path):
    text = """
import os, subprocess, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    open(sys.argv[1], "w").write(str(child.pid))
    raise SystemExit(1)
print("runs:", os.path.exists(f"/proc/{open(sys.argv[1]).read()}/fd/0"))
"""
    done = run("--max-restarts=1", script(text), str(tmp_path / "pid"))
    assert done.stdout == "[rank 0] runs: False\n", done.stderr


def test_events_are_lines_of_json(script):
    done = run("--event-log-handler=console", "--max-restarts=1", "--rdzv-id=j", script("raise SystemExit(3)"))
    assert done.returncode == 1
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [each["event"] for each in events] == ["start", "failure", "wait", "start", "failure", "end"]
    assert events[1]["rank"] == 0
    assert {each["run_id"] for each in events} == {"j"}


def test_a_stop_during_the_pause_is_heard(script):
    launcher = subprocess.Popen(
        command("--max-restarts=20", script("raise SystemExit(1)")), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        for line in launcher.stderr:
            if "in 1 s" in line:
                break
        launcher.terminate()
        assert launcher.wait(25) == 1  # the pauses between twenty restarts would take longer
    finally:
        launcher.kill()
        launcher.communicate()


def test_the_launcher_imports_no_torch():
    text = (
        "import sys, paceline.cli.main, paceline.operate.launch.worker_group_launcher; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", text], env=os.environ).returncode == 0


def test_forked_workers_fail_restart_and_meet_as_others_do(script):
    text = f"""
import os
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("once")
{MEET}
joined = rendezvous(None, None, -1, -1, 50)
print("met", joined.world_size, os.getpid() == os.getsid(0), flush=True)
"""
    done = run("--nproc-per-node=2", "--max-restarts=1", "--start-method=forkserver", script(text))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] met 2 True" for rank in range(2)]
    assert "bootstrap.py" not in done.stderr
    assert "template.py" not in done.stderr
    assert "ValueError: once" in done.stderr


def test_many_workers_meet(script):
    done = run("--nproc-per-node=64", script(f"{MEET}\nrendezvous(None, None, -1, -1, 50)"))
    assert done.returncode == 0, done.stderr
