"""The public names of `paceline`, and their consistency."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import paceline

ROOT = Path(__file__).parents[3]
NAMES = sorted(paceline.__all__)
MODULES = {name: getattr(getattr(paceline, name), "__module__", "") for name in NAMES}
OURS = [name for name in NAMES if not MODULES[name].startswith("torch")]


def test_every_public_name_is_there_and_says_what_it_is():
    wrong = []
    for name in OURS:
        value = getattr(paceline, name)
        wrong += [] if inspect.getdoc(value) else [f"{name} has no docstring"]
        methods = vars(value).items() if inspect.isclass(value) else ()
        wrong += [
            f"{name}.{method} has no docstring"
            for method, function in methods
            if not method.startswith("_")
            and inspect.isfunction(function)
            and not inspect.getdoc(getattr(value, method))
        ]
    assert not wrong, "\n".join(["", *wrong])


def test_the_stub_lists_the_same_names():
    stub = (Path(paceline.__file__).parent / "__init__.pyi").read_text()
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    assert sorted(name.name for node in imports for name in node.names if name.asname == name.name) == NAMES


def test_the_version_is_the_projects():
    assert f'version = "{paceline.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_importing_paceline_does_not_import_torch():
    code = "import sys, paceline, paceline.operate.launch.worker_group_launcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_what_a_worker_needs_to_meet_the_others_is_little():
    slow = {"dataclasses", "inspect", "json", "logging", "pathlib", "re", "shutil", "tempfile", "typing", "urllib"}
    code = f"import sys, paceline.comm.rendezvous.rendezvous as _; print(sorted({slow} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], timeout=60, capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "[]", f"256 workers each pay for it\n{done.stderr}"


def test_examples_in_docstrings_run():
    """The test imports only modules whose docstrings contain examples."""
    sources = ROOT / "src"
    files = [file.relative_to(sources) for file in sources.rglob("*.py") if ">>> " in file.read_text()]
    names = sorted(".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files)
    results = {name: doctest.testmod(import_module(name)) for name in names}
    failed = [
        f"{name}: {result.failed} of {result.attempted} failed" for name, result in results.items() if result.failed
    ]
    assert not failed, "\n".join(["the output below shows the examples", *failed])
    assert sum(result.attempted for result in results.values()) > 100


def test_the_readmes_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    tasks = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.M))
    assert tasks, "the README names no task of make"
    for task in tasks:
        assert re.search(rf"^{task}:", makefile, re.M), f"make {task} is not in the Makefile"
