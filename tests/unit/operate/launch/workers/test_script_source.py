"""Parsing of a program's source, from which the launcher determines how workers start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.operate.launch.elastic_options import ElasticOptions
from paceline.operate.launch.job import Command, CommandKind, Job
from paceline.operate.launch.workers.environment import allowed_cores
from paceline.operate.launch.workers.script_source import ScriptSource
from paceline.operate.launch.workers.start_workers import modules_to_fork

MANY = 8 * allowed_cores() + 1
TORCH = "import torch\n"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Returns a job of two workers whose script has this text, next to other files."""
    monkeypatch.chdir(tmp_path)
    for name in ("COVERAGE_PROCESS_START", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)

    def of(text: str | bytes, kind: CommandKind = CommandKind.SCRIPT, **files: str) -> Job:
        (tmp_path / "train.py").write_bytes(text if isinstance(text, bytes) else text.encode())
        for name, content in files.items():
            path = tmp_path / f"{name.replace('____init__', '/__init__').replace('__', '/', name.count('__') == 1)}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        program = "train" if kind is CommandKind.MODULE else str(tmp_path / "train.py")
        return Job(Command((program, "--lr", "1"), kind), workers=2)

    return of


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        (TORCH, ("torch",)),
        ("from torch import nn\nnn.Linear(1, 1)", ("torch",)),
        ("def train():\n    import torch.nn.functional as F", ("torch",)),
        ("import torch\ntorch.optim.SGD", ("torch", "torch._dynamo")),
        ("import paceline as dist", ("torch", "paceline.train.ddp.distributed_data_parallel")),
        ("import transformers", ("torch",)),
        ("print('torch')", None),
        ("import numpy", None),
        ("import torch as", None),
        (b"import torch\0", None),
        (b"\xff", None),
    ],
)
def test_workers_are_forked_after_their_slow_imports(job, text, modules):
    assert modules_to_fork(job(text)) == modules
    assert modules_to_fork(replace(job(text), start_method="spawn")) is None
    assert modules_to_fork(replace(job(text), start_method="fork")) == (modules or ())


@pytest.mark.parametrize(
    ("text", "imports_compiler"), [(TORCH, False), ("import torch\ntorch.optim.SGD", True), ("import torch as", True)]
)
def test_elastic_workers_import_the_compiler_for_optimizers(job, text, imports_compiler):
    modules = modules_to_fork(replace(job(text), elastic=ElasticOptions(2, None)))
    assert modules is not None
    assert ("torch._dynamo" in modules) == imports_compiler
    assert {"torch", "paceline.train.elastic.worker.elastic_state"} <= set(modules)


def test_imports_are_followed_into_the_modules_beside_a_script(job):
    in_package = "from package import layers"
    assert modules_to_fork(job("import helper", helper=in_package, package__layers=TORCH)) == ("torch",)
    assert modules_to_fork(job(in_package, package__layers="from .deep import x", package__deep=TORCH))
    assert modules_to_fork(job(in_package, package__layers="from . import deep", package__deep=TORCH))
    assert modules_to_fork(job("import a", a="import b\nimport torch", b="import a")) == ("torch",), "a circle"
    assert modules_to_fork(job("import helper, torch", helper="not Python!")) is None


@pytest.mark.parametrize("kind", [CommandKind.MODULE, CommandKind.PATH])
def test_modules_and_paths_are_read_as_scripts_are(job, kind):
    assert modules_to_fork(job(TORCH, kind)) == ("torch",)
    assert ScriptSource.of(Command(("not_there",), kind)) is None


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['OMP_NUM_THREADS'] = '4'",
        "os.environ['TQDM_DISABLE'] = '1'",
        "os.environ['MKL_NUM_THREADS'] += '4'",
        "os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'] = '3', '3'",
        "os.environ |= {'OMP_NUM_THREADS': '3'}",
        "os.environb[b'OMP_NUM_THREADS'] = b'3'",
        "os.environ.__setitem__('OMP_NUM_THREADS', '3')",
        "os.environ.popitem()",
        "for os.environ['OMP_NUM_THREADS'] in '12':\n    pass",
        "variables = os.environ\nvariables['OMP_NUM_THREADS'] = '4'",
        "del os.environ['TORCH_LOGS']",
        "os.environ.setdefault('TORCHDYNAMO_DISABLE', '1')",
        "os.environ.update({'MASTER_PORT': '1', 'KMP_AFFINITY': 'none'})",
        "os.environ.update(PYTORCH_JIT='0')",
        "os.environ.update(chosen)",
        "os.environ.update(**chosen)",
        "os.environ.update({**chosen})",
        "os.environ.pop('OMP_NUM_THREADS', None)",
        "os.environ.clear()",
        "os.putenv('GOMP_CPU_AFFINITY', '0')",
        "from os import putenv\nputenv('GOMP_CPU_AFFINITY', '0')",
        "from os import environ\nenviron['OMP_NUM_THREADS'] = '4'",
        "from os import environ as variables\nvariables['OMP_NUM_THREADS'] = '4'",
        "for name in chosen:\n    os.environ[name] = '1'",
        "from dotenv import load_dotenv\nload_dotenv()",
        "exec(open('settings.py').read())",
        "import importlib\nimportlib.import_module('settings')",
    ],
)
def test_programs_that_set_variables_of_torch_are_not_forked(job, statement):
    assert modules_to_fork(job(f"import os\n{statement}\nimport torch")) is None
    assert modules_to_fork(job("import mine, torch", mine=f"import os\n{statement}")) is None
    assert modules_to_fork(replace(job(f"import os, torch\n{statement}"), start_method="fork")) == ()


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['MASTER_PORT'] = '29500'",
        "os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']",
        "rank = int(os.environ['RANK'])",
        "os.environ.get('OMP_NUM_THREADS')",
        "os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')",
        "os.environ.update(NCCL_DEBUG='INFO')",
        "os.environ.update({'WANDB_MODE': 'offline'})",
        "if 'OMP_NUM_THREADS' in os.environ:\n    pass",
        "import subprocess\nsubprocess.run(['true'], env={**os.environ, 'OMP_NUM_THREADS': '1'})",
        "import subprocess\nsubprocess.run(['true'], env=os.environ)",
        "variables = dict(os.environ)",
        "settings = {}\nsettings['OMP_NUM_THREADS'] = 4",
        "model.eval()",
    ],
)
def test_other_variables_may_be_set(job, statement):
    assert modules_to_fork(job(f"import os, torch\n{statement}")) == ("torch",)


def test_a_package_that_is_run_is_read_with_its_parents(job):
    package = job(TORCH, CommandKind.MODULE, package__train=TORCH, package____init__="import os\nos.environ['A'] = ''")
    inner = replace(package, command=Command(("package.train",), CommandKind.MODULE))
    assert modules_to_fork(inner) is None


def test_sources_that_cannot_be_judged_are_not_forked(job, tmp_path, recwarn):
    assert modules_to_fork(job("import queue, torch", queue="def helper(): pass")) is None, (
        "the fork has Python's queue"
    )
    assert modules_to_fork(job("import tqdm, torch", tqdm="")) is None, "the fork has the tqdm that torch imported"
    assert modules_to_fork(job(f"import torch, {'x' * 300}")) == ("torch",)
    assert modules_to_fork(job("import torch\n" + "# comment\n" * 300_000)) is None
    assert modules_to_fork(job("import torch\npattern = '\\d'")) == ("torch",)
    assert not recwarn.list, "the worker shows the warning"
    (tmp_path / "locked").mkdir(mode=0)
    assert modules_to_fork(job("import locked, torch")) == ("torch",)


def test_jobs_that_gain_nothing_or_are_observed_are_not_forked(job, monkeypatch):
    assert modules_to_fork(replace(job(TORCH), workers=1)) is None
    assert modules_to_fork(replace(job(TORCH), compat=("torch",))) is None
    assert modules_to_fork(job(TORCH, CommandKind.PROGRAM)) is None
    for name in ("COVERAGE_PROCESS_START", "PYTHONPROFILEIMPORTTIME"):
        with monkeypatch.context() as observed:
            observed.setenv(name, "1")
            assert modules_to_fork(job(TORCH)) is None
    with monkeypatch.context() as bound:
        bound.setenv("OMP_PROC_BIND", "true")
        assert modules_to_fork(job(TORCH)) is None
        assert modules_to_fork(replace(job(TORCH), start_method="fork")) == ()
    monkeypatch.setenv("PYTHON_EXEC", f"{sys.executable}-of-another-environment")
    assert modules_to_fork(job(TORCH)) is None


def test_many_workers_a_core_are_forks_whatever_they_import(job):
    assert modules_to_fork(replace(job("import numpy"), workers=MANY)) == ()
    assert modules_to_fork(replace(job("import os, torch\nos.environ['OMP_A'] = ''"), workers=MANY)) == ()
    assert modules_to_fork(replace(job(TORCH), workers=MANY)) == ("torch",)
    assert modules_to_fork(replace(job(TORCH), workers=MANY, start_method="spawn")) is None
