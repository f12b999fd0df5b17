"""A script's environment under `paceline run` is the same as under `python SCRIPT`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launching import run

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
