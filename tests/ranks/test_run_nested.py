"""Child processes of a worker may start their own job, or form groups with the job's secret or their own."""

from __future__ import annotations

import os
import signal
import sys

import forked_launcher
import pytest
from launching import ENVIRONMENT, MEET, is_alive, run, wait_until

INNER = f"""
import os
{MEET}
print("inner", os.environ["WORLD_SIZE"], rendezvous(None, None, -1, -1, 50).world_size, flush=True)
"""
NESTED = """
import subprocess, sys
inner = [sys.executable, "-m", "paceline", "run", "--nproc-per-node=2", sys.argv[1]]
print(subprocess.run(inner, stdin=subprocess.DEVNULL).returncode)
"""
# Rank 0's child is a new interpreter, and rank 1's child is a fork.
BY_THE_JOBS_STORE = """
import os, subprocess, sys
child = "import paceline, torch; paceline.init_process_group(); t = torch.ones(1); paceline.all_reduce(t); print(t)"
if os.environ["RANK"] == "0":
    sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
if (pid := os.fork()) == 0:
    exec(child)
    sys.stdout.flush()
    os._exit(0)
sys.exit(os.waitpid(pid, 0)[1])
"""
OWN_JOB = """
import os, socket, sys
import paceline, torch
with socket.create_server(("127.0.0.1", 0)) as probe:
    place = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
children = []
for n in range(2):
    if (child := os.fork()) == 0:
        os.environ["PACELINE_SECRET"] = "a secret of the children, long enough"
        paceline.init_process_group(init_method=place, rank=n, world_size=2)
        t = torch.ones(1); paceline.all_reduce(t); print(t, flush=True)
        os._exit(0)
    children.append(child)
sys.exit(max(os.waitpid(each, 0)[1] for each in children))
"""
TAKEN = f"""
import os
{MEET}
fd = int(os.environ["PACELINE_SECRET_FD"].split(":")[0])
other = os.open(__file__, os.O_RDONLY)
os.dup2(other, fd)
print("met", rendezvous(None, None, -1, -1, 50).world_size)
"""
LOADER = """
import paceline
from torch.utils.data import DataLoader
if __name__ == "__main__":
    paceline.init_process_group()
    print("sum", sum(int(x) for x in DataLoader(range(10), batch_size=None, num_workers=2)))
"""
WITHOUT_GUARD = """
import paceline
from torch.utils.data import DataLoader
paceline.init_process_group()
list(DataLoader(range(10), num_workers=1, multiprocessing_context="spawn"))
"""


def test_a_worker_starts_a_job_of_its_own(script):
    ended = run(script(NESTED), script(INNER, "inner.py"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("inner 2 2") == 2


@pytest.mark.parametrize("text", [BY_THE_JOBS_STORE, OWN_JOB], ids=["the job's store", "a secret of their own"])
def test_children_of_workers_form_a_group(script, text):
    ended = forked_launcher.run(f"--nproc-per-node={2 if text is BY_THE_JOBS_STORE else 1}", script(text))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("tensor([2.])") == 2


def test_a_taken_descriptor_number_does_not_become_the_secret(script):
    ended = run("--nproc-per-node=2", script(TAKEN))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("met 2") == 2


def test_loader_processes_of_a_worker_are_no_trouble(script):
    ended = forked_launcher.run("--nproc-per-node=2", script(LOADER))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("sum 45") == 2


def test_a_script_that_its_loader_processes_run_again_is_named(script):
    ended = forked_launcher.run("--nproc-per-node=1", script(WITHOUT_GUARD))
    assert ended.returncode == 1
    assert "RuntimeError: rank 0: the script runs again in process" in ended.stderr
    assert 'Put the code that trains in `if __name__ == "__main__":`' in ended.stderr


# The outer launcher's guards kill the inner launcher and its guards, so the outer guards must also find the children of
# the inner workers.
APART = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(child.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
child.wait()
"""
AROUND = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'paceline', 'run', *sys.argv[1:]])"


def test_nothing_of_a_job_within_a_killed_job_is_left(script, tmp_path):
    from subprocess import DEVNULL, Popen

    up = tmp_path / "up"
    words = [script(AROUND), script(APART, "inner.py"), str(up)]
    launcher = Popen([sys.executable, "-m", "paceline", "run", *words], env=ENVIRONMENT, stdout=DEVNULL, stderr=DEVNULL)
    try:
        wait_until(up.exists)
        child = int(up.read_text())
        launcher.kill()
        wait_until(lambda: not is_alive(child))
    finally:
        launcher.kill()
        launcher.wait()
        if up.exists() and is_alive(int(up.read_text())):
            os.kill(int(up.read_text()), signal.SIGKILL)
