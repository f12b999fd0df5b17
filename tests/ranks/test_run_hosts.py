"""`paceline run --hosts` as users run it: over a real sshd on loopback, and on this machine alone."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import ENVIRONMENT, MEET, command, is_alive, kill, processes_with, run, wait_until
from ssh_server import ADDRESSES, new_key, ssh_server

import paceline

__all__ = ["ssh_server"]

A, B = ADDRESSES
WHERE = (
    "import os, sys\n"
    f"{MEET}\n"
    "met = rendezvous('env://', None, -1, -1, 60)\n"
    "print(met.rank, met.world_size, os.environ['NODE_RANK'], os.getcwd(), os.environ.get('COLOR'),"
    " repr(sys.stdin.read()))\n"
    "met.store.set(f'done {met.rank}', b'')\n"
    "if met.rank == 0:  # which serves the store\n"
    "    met.store.wait([f'done {rank}' for rank in range(met.world_size)])\n"
)
SLEEPER = "import os, sys, time\nopen(f'{sys.argv[1]}{os.environ[\"RANK\"]}', 'w').close()\ntime.sleep(300)\n"
SPY = (
    "import glob, sys\n"
    "wanted = [sys.argv[1].encode()[::-1], sys.argv[1].encode()[::-1].hex().encode()]\n"
    "seen = 0\n"
    "for path in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n"
    "    try:\n"
    "        text = open(path, 'rb').read()\n"
    "    except OSError:\n"
    "        continue\n"
    "    seen += any(each in text for each in wanted)\n"
    "print('seen', seen)\n"
)

Start = Callable[..., tuple["subprocess.Popen[str]", list[int]]]


@pytest.fixture
def sleepers(script, tmp_path, ssh_server) -> Iterator[Start]:
    """Starts a job with sleeping workers on two machines; returns the launching process and the workers."""
    started: list[subprocess.Popen[str]] = []
    mark = f"sleepers-{secrets.token_hex(8)}"

    def start(*arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
        base = tmp_path / "started"
        hosts = ("--hosts", ssh_server.hosts(1, 1), "--ssh", ssh_server.ssh(), "--export", f"MARK={mark}")
        words = command(*hosts, *arguments, script(SLEEPER), str(base))
        launcher = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        started.append(launcher)
        wait_until(lambda: launcher.poll() is not None or all(Path(f"{base}{rank}").exists() for rank in range(2)))
        return launcher, processes_with(mark)

    yield start
    for each in started:
        each.kill()
        each.communicate()
    wait_until(lambda: not processes_with(mark))


def test_a_job_runs_on_two_machines(script, ssh_server, tmp_path):
    arguments = ("--hosts", ssh_server.hosts(1, 2), "--ssh", ssh_server.ssh(), "--export", "COLOR=red")
    done = run(*arguments, script(WHERE), cwd=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "[rank" in line) == [
        f"[{A}] [rank 0] 0 3 0 {tmp_path} red ''",
        f"[{B}] [rank 1] 1 3 1 {tmp_path} red ''",
        f"[{B}] [rank 2] 2 3 1 {tmp_path} red ''",
    ]


def test_the_secret_is_in_no_command_line_or_environment(script, ssh_server, tmp_path):
    """The search program receives the secret in reverse, so that its own command line does not contain the secret."""
    secret = secrets.token_hex(32)
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(secret)
    arguments = ("--hosts", ssh_server.hosts(1, 1), "--ssh", ssh_server.ssh())
    done = run(*arguments, script(SPY), secret[::-1], env={**ENVIRONMENT, "PACELINE_SECRET_FILE": str(file)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seen 0") == 2, done.stdout


def test_the_failure_of_a_rank_ends_the_job(script, ssh_server):
    text = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('the cause')\ntime.sleep(300)"
    done = run("--hosts", ssh_server.hosts(1, 1), "--ssh", ssh_server.ssh(), script(text))
    assert done.returncode == 1
    assert f"[{B}] " in done.stderr and "ValueError: the cause" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda each: each.name)
def test_the_launchers_end_with_the_ssh_launcher(sleepers, number):
    launcher, workers = sleepers()
    assert workers, launcher.stderr.read()
    launcher.send_signal(number)
    assert launcher.wait(60) == (-number if number == signal.SIGKILL else 1)
    wait_until(lambda: not any(map(is_alive, workers)))


def test_a_connection_that_breaks_ends_the_job(sleepers):
    launcher, workers = sleepers()
    ssh = [
        int(child)
        for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        if B.encode() in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    kill(ssh)
    _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 1 and len(ssh) == 1
    assert f"@{B}: its launcher was killed, or the ssh connection to it broke" in errors
    wait_until(lambda: not any(map(is_alive, workers)))


def test_a_refused_key_is_said_with_the_machine(script, ssh_server, tmp_path):
    new_key(tmp_path / "other")
    done = run(
        "--hosts", ssh_server.hosts(1, 1), "--ssh", ssh_server.ssh(IdentityFile=str(tmp_path / "other")), script("")
    )
    assert done.returncode == 1
    for address in ADDRESSES:
        assert f"@{address}: it rejected this user's key" in done.stderr
    assert "ssh-copy-id" in done.stderr


def test_an_unknown_host_key_is_said_with_the_machine(script, ssh_server):
    done = run("--hosts", ssh_server.hosts(1), "--ssh", ssh_server.ssh(UserKnownHostsFile="/dev/null"), script(""))
    assert done.returncode == 1
    assert f"@{A}: its host key is not known here; compare it and accept it once" in done.stderr


def test_a_machine_that_serves_no_ssh_is_named(script, ssh_server):
    with_nobody = ssh_server.ssh(Port="9")
    done = run("--hosts", ssh_server.hosts(1), "--ssh", with_nobody, script(""))
    assert done.returncode == 1 and f"@{A}: no ssh server listens there" in done.stderr


def python_that(tmp_path: Path, text: str) -> str:
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'exec {sys.executable} -S -E "$@"', f"there has no paceline {paceline.__version__}; install it: ssh"),
        (
            'echo; echo \'PACELINE-FAR-END {"type":"Hello","version":"9.9","python":"/far"}\'; cat',
            f"/far has paceline 9.9 there, and this machine has {paceline.__version__}",
        ),
    ],
    ids=["absent", "another version"],
)
def test_a_paceline_that_does_not_fit_is_named(script, ssh_server, tmp_path, text, said):
    python = python_that(tmp_path, text)
    words = ("--hosts", ssh_server.hosts(1), "--ssh", ssh_server.ssh(), "--remote-python", python, script(""))
    done = run(*words, cwd="/")
    assert done.returncode == 1 and f"@{A}: " in done.stderr and said in done.stderr


def test_a_missing_interpreter_or_directory_is_named(script, ssh_server):
    words = ("--hosts", ssh_server.hosts(1), "--ssh", ssh_server.ssh())
    done = run(*words, "--remote-python", "/nowhere/python", script(""))
    assert done.returncode == 1 and "/nowhere/python does not exist there" in done.stderr
    done = run(*words, "--remote-dir", "/nowhere", script(""))
    assert done.returncode == 2 and "has no accessible directory /nowhere" in done.stderr


def test_this_machine_needs_no_ssh(script):
    done = run("--hosts", "localhost:2", "--ssh", "/nowhere/ssh", script(WHERE))
    assert done.returncode == 0, done.stderr
    assert sorted(line[:23] for line in done.stdout.splitlines() if "[rank" in line) == [
        f"[localhost] [rank {rank}] {rank} 2"[:23] for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hosts", "a:1", "--nnodes", "2"), "leave --nnodes out"),
        (
            (
                "--hosts",
                "a:0",
            ),
            "has no workers",
        ),
        (
            ("--hosts", "somebody@127.0.0.1", "--ssh", "/nowhere/ssh"),
            "/nowhere/ssh, which is needed to reach 127.0.0.1, was not found on this machine",
        ),
    ],
)
def test_what_does_not_go_with_hosts_is_refused(script, arguments, said):
    done = run(*arguments, script(""))
    assert done.returncode == 2 and said in done.stderr


def test_a_dry_run_prints_how_launchers_are_started(script):
    done = run("--hosts", "anna@127.0.0.1:4,localhost:2", "--dry-run", script(""))
    assert done.returncode == 0
    ssh, here = done.stdout.splitlines()
    assert ssh.startswith("anna@127.0.0.1: ssh -T") and "remote_launcher import main" in ssh
    assert here.startswith(f"localhost: {sys.executable} -c ") and "remote_launcher import main" in here
    assert os.environ.get("PACELINE_SECRET", "no secret") not in done.stdout
