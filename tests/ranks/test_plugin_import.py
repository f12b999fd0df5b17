"""The entry point registers the backend at `import torch`, and never breaks or delays the import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KNOWN = "import torch; print(torch.distributed.is_backend_available('paceline'))"


@pytest.fixture
def installed(tmp_path):
    """Runs code in a new interpreter in which the package's entry point is installed."""
    information = tmp_path / "paceline-0.0.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 0.0.0\n")
    section = re.search(
        r'\[project.entry-points."torch.backends"\]\n(\w+) = "(.+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert section is not None
    (information / "entry_points.txt").write_text(f"[torch.backends]\n{section[1]} = {section[2]}\n")

    def run(code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        return subprocess.run(
            [sys.executable, *options, "-c", code], env=environment, capture_output=True, text=True, timeout=100
        )

    return run


def test_the_backend_is_known_whatever_is_imported_first(installed):
    done = installed("import paceline.comm.group.default; " + KNOWN)
    assert done.stdout == "True\n", done.stderr


def test_a_broken_installation_breaks_only_its_own_groups(installed):
    """Importing torch loads only the entry point of the package."""
    code = (
        "import paceline, sys; sys.modules['paceline._core'] = None; sys.modules['msgspec'] = None\n"
        f"{KNOWN}\n"
        "print(sorted(name for name, module in sys.modules.items() if name.startswith('paceline') and module))\n"
        "try:\n"
        "    store = torch.distributed.HashStore()\n"
        "    torch.distributed.init_process_group('paceline', store=store, rank=0, world_size=1)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = installed(code, "-W", "error")
    known, loaded, error = done.stdout.splitlines()
    assert known == "True", done.stderr
    assert loaded == "['paceline', 'paceline.interop', 'paceline.interop.torch_backend']"
    assert error.startswith("import of paceline._core halted")


def test_without_autoloading_one_call_makes_it_known(installed):
    """A fork of the same interpreter shows that an error during the registration does not abort the import of torch."""
    code = (
        f"{KNOWN}\n"
        "import os, sys\n"
        "if (child := os.fork()) == 0:\n"
        "    torch.distributed.Backend.register_backend = None\n"
        "    torch.distributed.Backend.backend_list = ['gloo']\n"
        "    torch._import_device_backends()\n"
        "    print('imported', flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print('end of errors', file=sys.stderr, flush=True)\n"
        f"import paceline.plugin; paceline.plugin.register(); paceline.plugin.register(); {KNOWN}"
    )
    done = installed(code, "-W", "error", TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONUNBUFFERED="1")
    assert done.stdout == "False\nimported\nTrue\n", done.stderr
    of_error, _, of_call = done.stderr.partition("end of errors")
    assert "the backend 'paceline' could not be registered with torch.distributed: TypeError" in of_error
    assert "paceline" not in of_call
