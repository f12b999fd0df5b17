"""The process from which workers are forked reports why its imports forbid that."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import threading, torch
from paceline.operate.launch.workers import template
{change}
print(template._unsafe())
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("", ""),
        ("torch.cuda._is_in_bad_fork = lambda: True", "its imports initialized a device, which forks cannot use"),
        ("torch.xpu.is_initialized = lambda: True", "its imports initialized a device, which forks cannot use"),
        ("torch.utils.rename_privateuse1_backend('npu')", "its imports registered the device 'npu'"),
        (
            "threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "it has threads after its imports (python",
        ),
    ],
)
def test_imports_that_forbid_forks_are_named(change, reason):
    code = CODE.format(change=change)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(reason), done.stdout
    assert reason or done.stdout == "\n"
