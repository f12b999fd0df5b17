"""The process that forks workers reports imports that prevent forking."""

from __future__ import annotations

import subprocess
import sys

# The code runs in a separate process, because the last two changes cannot be undone. It runs only once, because
# importing torch is slow.
CODE = """
import threading, torch
from unittest.mock import patch
from paceline import linux
from paceline.operate.launch.workers import template

def report():
    print(template._unsafe() or "safe", flush=True)

report()
with patch.object(torch.cuda, "_is_in_bad_fork", lambda: True):
    report()
with patch.object(torch.xpu, "is_initialized", lambda: True):
    report()
with open("/dev/full") as driver, patch.object(linux, "CUDA_DEVICE", "/dev/full"):
    report()
threading.Thread(target=threading.Event().wait, daemon=True).start()
report()
torch.utils.rename_privateuse1_backend("npu")
report()
"""
REPORTS = [
    "safe",
    "its imports initialized a device, which forks cannot use",
    "its imports initialized a device, which forks cannot use",
    "its imports initialized CUDA's driver (/dev/full is open), which forks cannot use",
    "it has threads after its imports (",
    "its imports registered the device 'npu'",
]


def test_imports_that_forbid_forks_are_named():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[: len(report)] for line, report in zip(lines, REPORTS, strict=True)] == REPORTS, lines
    assert lines[0] == "safe"
