"""The ways to start workers: old and new interface, script, module, program, path; and the output of `--dry-run`."""

from __future__ import annotations

import ast
import os
import py_compile
import subprocess
import sys
import zipapp

import pytest
from launching import ENVIRONMENT, MEET, run

import paceline as dist

PLACE = "import os, sys; print(os.environ['RANK'], os.environ['LOCAL_RANK'], *sys.argv[1:], __name__)"


def old_form(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "paceline.launch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.fixture
def place(script):
    """Returns the path of a script that prints its location."""
    return script(PLACE)


def test_the_old_form_passes_the_local_rank(place):
    expected = [f"[rank {r}] {r} {r} --local_rank={r} --x 1 __main__" for r in range(2)]
    assert old_form("--nproc_per_node=2", place, "--x", "1") == expected


def test_the_old_form_with_use_env_does_not(place):
    assert old_form("--nproc_per_node=1", "--use_env", place, "y") == ["[rank 0] 0 0 y __main__"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--run-path"], lambda place: [place, "a"]),
        (["--no-python"], lambda place: [sys.executable, place, "a"]),
        (["-m"], lambda _: ["script", "a"]),
        (["--start-method", "forkserver"], lambda place: [place, "a"]),
        (["--start-method", "fork", "-m"], lambda _: ["script", "a"]),
        (["--start-method", "forkserver", "--run-path"], lambda place: [place, "a"]),
        (["--start-method", "forkserver", "--no-python"], lambda place: [sys.executable, place, "a"]),
        (["--monitor-interval", "1"], lambda place: [place, "a"]),
    ],
)
def test_each_kind_of_command_runs(place, flags, words):
    done = run(*flags, *words(place), cwd=os.path.dirname(place))
    assert (done.returncode, done.stdout) == (0, "[rank 0] 0 0 a __main__\n"), done.stderr


PACKAGED = """
import os, pickle, sys
from beside import word
class Record: pass
assert isinstance(pickle.loads(pickle.dumps(Record())), Record)
print(word, os.environ["RANK"], *sys.argv[1:], __name__, os.path.basename(__file__))
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("form", ["directory", "zip", "compiled"])
def test_what_python_runs_as_a_script_runs(tmp_path, form, method):
    program = tmp_path / "program"
    program.mkdir()
    (program / "beside.py").write_text("word = 'beside'")
    (program / "__main__.py").write_text(PACKAGED)
    path, file = str(program), "__main__.py"
    if form == "zip":
        path = str(tmp_path / "program.pyz")
        zipapp.create_archive(program, path, interpreter="/usr/bin/env python3")
    elif form == "compiled":
        file = "train.pyc"
        path = py_compile.compile(str(program / "__main__.py"), str(program / file))
    expected = f"[rank 0] beside 0 --lr 1 __main__ {file}\n"
    done = run("--start-method", method, path, "--lr", "1", cwd=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    relative = run("--start-method", method, os.path.relpath(path, tmp_path), "--lr", "1", cwd=str(tmp_path))
    assert (relative.returncode, relative.stdout) == (0, expected), relative.stderr


def test_an_exception_in_a_directory_has_its_traceback(tmp_path):
    (tmp_path / "__main__.py").write_text("\nraise ValueError('a mistake')")
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: a mistake; its traceback is above")
    assert f'File "{tmp_path}/__main__.py", line 2' in done.stderr


def test_what_cannot_be_a_script_is_told(tmp_path):
    done = run(str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path} is a directory without __main__.py" in done.stderr
    other = tmp_path / "other.pyc"
    other.write_bytes(bytes(100))
    done = run(str(other))
    assert done.returncode == 1
    assert f"{other} is not compiled code of this version of Python (" in done.stderr


WITHOUT_CALLS = """
import fcntl, os, signal
for module in (os, fcntl, signal):
    for name in [*vars(module)]:
        if name.startswith(("pidfd_", "memfd_", "MFD_", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_", "F_OFD_")):
            delattr(module, name)
"""
REFUSED = """
import errno, os
def refuse(*_): raise OSError({}, "refused")
os.pidfd_open = refuse
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(
    "system",
    [WITHOUT_CALLS, REFUSED.format("errno.ENOSYS"), REFUSED.format("errno.EPERM")],
    ids=["a Python built for older systems", "an old kernel", "a sandbox"],
)
def test_a_job_runs_without_calls_of_newer_systems(script, tmp_path, system, method):
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "sitecustomize.py").write_text(system)
    text = "import os; print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT']); " + (
        f"{MEET}; rendezvous(None, None, -1, -1, 60); "
        "assert os.environ['RANK'] == '0' or os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'"
    )
    path = os.pathsep.join([str(tmp_path / "system"), os.environ.get("PYTHONPATH", "")])
    words = ["--nproc-per-node=2", "--max-restarts=1", "--start-method", method, script(text)]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", *words],
        capture_output=True,
        text=True,
        timeout=110,
        env={**ENVIRONMENT, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    attempts = [f"[rank {rank}] attempt {attempt}" for rank in range(2) for attempt in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted(attempts)


def test_a_program_that_is_none_is_named():
    done = run("--no-python", "/nowhere/program")
    assert done.returncode == 1
    assert "/nowhere/program cannot be executed (No such file or directory)" in done.stderr


def test_a_role_and_a_virtual_local_rank_reach_the_worker(script):
    path = script("import os; print(*(os.environ[n] for n in ('ROLE_NAME', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES')))")
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "5,7"}
    done = run("--role", "eval", "--virtual-local-rank", "--nproc-per-node", "2", path, env=environment)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] eval 0 5", "[rank 1] eval 0 7"]


def test_a_dry_run_starts_nothing_and_says_what_it_would(place):
    done = run("--dry-run", "--nproc-per-node=2", "--max-restarts=3", place, "--lr", "0.1", env={"PATH": "/usr/bin"})
    assert done.returncode == 0, done.stderr
    assert "3 restarts" in done.stdout
    assert "RANK=1" in done.stdout
    assert "WORLD_SIZE=2" in done.stdout
    assert f"{place} --lr 0.1" in done.stdout
    assert "__main__" not in done.stdout


def test_a_dry_run_of_one_of_two_machines_knows_its_ranks(place):
    done = run("--dry-run", "--nnodes=2", "--node-rank=1", "--master-addr=h0", "--nproc-per-node=2", place)
    assert "rank 3, " in done.stdout
    assert "with the rendezvous at h0:29500; this is machine 1" in done.stdout


CELL = """
import paceline
def cell(rank, text):
    import os
    assert os.environ["WORLD_SIZE"] == "2"
    open(f"{text}{rank}", "w").close()
paceline.notebook_launch(cell, 2, ("%s",))
"""


def test_a_function_of_a_notebook_runs_on_every_rank(tmp_path):
    subprocess.run([sys.executable], input=CELL % (tmp_path / "rank"), text=True, check=True, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


CELLS_THAT_COMPUTE = """
import torch, paceline
torch.set_num_threads(4)
torch.rand(1 << 20).exp()  # starts OpenMP's threads, which a fork has not

def compute(rank):
    torch.rand(1 << 20).exp()
    open("%s", "w").close()

paceline.notebook_launch(compute, 1)
"""


def test_a_notebook_that_has_computed_has_ranks_that_compute(tmp_path):
    done = tmp_path / "done"
    subprocess.run([sys.executable], input=CELLS_THAT_COMPUTE % done, text=True, check=True, timeout=60)
    assert done.exists()


def fail(rank: int) -> None:
    raise KeyError(f"of {rank}")


def test_a_function_of_a_notebook_that_fails_raises_there():
    with pytest.raises(dist.WorkerError, match="KeyError: 'of "):
        dist.notebook_launch(fail, 2)


CORES = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"


def test_workers_are_bound_to_cores_of_their_own(script):
    path = script(CORES)
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one core")
    for method in ("spawn", "forkserver"):
        bound = run("--nproc-per-node=2", f"--start-method={method}", path).stdout.splitlines()
        sets = [set(ast.literal_eval(line.split("] ", 1)[1].rpartition(" ")[0])) for line in sorted(bound)]
        assert not sets[0] & sets[1]
    free = run("--nproc-per-node=2", "--no-pin", path).stdout.splitlines()
    assert all(str(mine) in line for line in free)
    chosen = run("--nproc-per-node=2", path, env={**ENVIRONMENT, "OMP_NUM_THREADS": "7"}).stdout.splitlines()
    assert all(line.endswith(" 7") for line in chosen)
