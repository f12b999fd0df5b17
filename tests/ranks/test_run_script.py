"""A script's environment under `paceline run` is the same as under `python SCRIPT`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launching import ENVIRONMENT, run

ITSELF = "import os, sys; os.chdir('/'); print(__file__, sys.argv[0], (lambda: 0).__code__.co_filename)"


@pytest.mark.parametrize("path", ["script.py", "./script.py", "below/script.py"])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_script_finds_its_path_as_under_python(tmp_path, path, method):
    script = tmp_path / path
    script.parent.mkdir(exist_ok=True)
    script.write_text(ITSELF)
    plain = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    done = run(f"--start-method={method}", path, cwd=str(tmp_path))
    assert done.stdout == f"[rank 0] {plain.stdout}"


@pytest.mark.parametrize("form", [["script.py"], ["-m", "script"]])
@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is new in Python 3.11")
def test_with_pythonsafepath_only_pythonpath_is_searched(tmp_path, monkeypatch, form, method):
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "script.py").write_text(code := "import sys; print(sys.path[0], __file__)")
    (tmp_path / "script.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(libraries), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    plain = subprocess.run([sys.executable, *form], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert plain.stdout.startswith(f"{libraries} ")
    done = run(f"--start-method={method}", *form, cwd=str(tmp_path), env={**ENVIRONMENT, "PYTHONSAFEPATH": "1"})
    assert done.stdout == f"[rank 0] {plain.stdout}"
