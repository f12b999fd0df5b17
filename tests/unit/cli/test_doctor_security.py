"""The doctor finds the processes of jobs, regardless of the environment that they were started with."""

from __future__ import annotations

import os
import subprocess
import sys

from paceline.cli.doctor.security import check_security
from paceline.operate.launch.workers.cleanup import MARK

# A launcher or rank that was forked from a process without the mark, and a process that sets the mark too late.
FORKED = """
import os, socket, sys
from paceline import _core
if os.fork():
    os.environ["PACELINE_JOB"] = "0123."
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_a_process_without_a_mark_in_its_environment_is_found():
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", FORKED], **options) as process:
        port = process.stdout.readline().strip()
        found = [diagnostic.seen for diagnostic in check_security() if diagnostic.about == "listener"]
        process.stdin.close()
    assert f"tcp:127.0.0.1:{port}: reachable from this machine only" in found
    assert process.returncode == 0
