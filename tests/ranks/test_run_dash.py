"""`paceline run --dash`, `paceline top` and `paceline report` on a real job."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dash_training import TRAIN
from forked_launcher import ForkedLauncher, run_command
from launching import ENVIRONMENT, command, run, wait_until

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


SENTENCE = r"training, step \d+ of 100,000, 2 of 2 ranks, about .* left"


class Job:
    """A job with a page, and the output of its launcher."""

    def __init__(self, runs: Path, arguments: list[str]) -> None:
        self.environment = {**ENVIRONMENT, "PACELINE_RUNS_DIR": str(runs)}
        self._printed = runs.with_name("err")
        self.process = ForkedLauncher(["run", *arguments], self.environment, runs.with_name("out"), self._printed)
        wait_until(lambda: "?token=" in "".join(self.lines))
        found = re.search(r"http://localhost:(\d+)\S*\?token=(\w+)", "".join(self.lines))
        assert found is not None
        self.address, self.port, self.token = found[0], int(found[1]), found[2]

    @property
    def lines(self) -> list[str]:
        return self._printed.read_text().splitlines(keepends=True)

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("localhost", self.port, timeout=60)
        connection.request(method, path, headers={"Authorization": f"Bearer {self.token}", **headers})
        answer = connection.getresponse()
        try:
            return answer.status, answer.read()
        finally:
            connection.close()

    def picture(self) -> dict:
        status, body = self.ask("/picture.json")
        assert status == 200
        return json.loads(body)

    def wait_for(self, condition: Callable[[dict], object]) -> dict:
        met: list[dict] = []

        def look() -> bool:
            picture = self.picture()
            if condition(picture):
                met.append(picture)
            return bool(met)

        wait_until(look)
        return met[0]

    def paceline(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_command(*words, env=self.environment)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def start(script, tmp_path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def starting(*words: str, arguments: tuple[str, ...] = ()) -> Job:
        flags = ["--dash", "--nproc-per-node", "2", *words, script(TRAIN), *arguments]
        jobs.append(Job(tmp_path / "runs", flags))
        return jobs[-1]

    yield starting
    for job in jobs:
        job.end()


def listening() -> set[str]:
    """Returns the local addresses of all listening TCP sockets of this machine."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(fields[1])
    return found


def test_the_page_of_a_job_shows_its_steps_and_who_is_stuck(start, tmp_path):
    before, stuck = listening(), tmp_path / "stuck"
    job = start("--stall-after", "3", "--dash-actions", arguments=(str(stuck),))
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert listening() - before >= {f"{loopback}:{job.port:04X}"}
    picture = job.wait_for(
        lambda told: (
            len(told["steps"]["items"]) > 3
            and told["curves"]["items"]
            and all(row["state"] == "training" and row["samples_per_s"] > 0 for row in told["ranks"])
            and re.fullmatch(SENTENCE, told["header"]["sentence"])
        )
    )
    assert [row["rank"] for row in picture["ranks"]] == [0, 1]
    assert all(row["memory_nbytes"] > 1 << 20 for row in picture["ranks"])
    assert picture["timeline"]["lanes"][0]["buckets"]
    assert {point["name"] for point in picture["curves"]["items"]} == {"loss"}
    assert [line["text"] for line in picture["log"]["items"][:2]] == ["<b>begun</b>"] * 2
    assert b"paceline_samples_per_second{" in job.ask("/metrics")[1]
    top = job.paceline("top", "--once")
    assert "Training, step " in top.stdout and re.search(r"^ +1 \S+ +training", top.stdout, re.MULTILINE), top.stderr

    stuck.touch()
    told = job.wait_for(lambda told: told["verdict"])
    assert told["verdict"]["ranks"] == [1]
    assert "rank 1 " in told["verdict"]["sentence"] and "script.py:" in told["verdict"]["sentence"]
    assert told["header"]["sentence"].startswith("stuck for ")
    assert [row["is_blamed"] for row in told["ranks"]] == [False, True]
    assert told["ranks"][0]["state"] == "waiting" and "all_reduce" in told["ranks"][0]["doing"]
    assert told["events"]["items"][-1]["kind"] == "stall"
    job.wait_for(
        lambda told: [text for text in told["owed"] if text.startswith("rank 0 waits for rank 1 in all_reduce(float32")]
    )
    status, body = job.ask("/actions/stacks", "POST", **{"X-Paceline-Action": "stacks"})
    assert (status, json.loads(body)) == (200, {"report": "captured the stacks of 2 workers on this machine"})
    stacks = job.wait_for(lambda told: len(told["stacks"]) == 2)["stacks"]
    assert re.search(r"script\.py:\d+ in <module>", stacks[1]["text"])

    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(60) == 1
    (directory,) = (tmp_path / "runs").iterdir()
    assert not (directory / "page.json").exists()
    report = job.paceline("report", str(directory), "-o", str(tmp_path / "report.html"))
    assert re.search(r"report.html: stopped after .*, step \d+ of 100,000", report.stdout), report.stderr
    assert b"<b>begun" not in (tmp_path / "report.html").read_bytes()


WAITING = """
import os, sys, time
open(sys.argv[1] + "/up" + os.environ["RANK"], "w").close()
while not os.path.exists(sys.argv[1] + "/end"):
    time.sleep(0.01)
"""


def test_an_open_page_shows_that_all_ranks_ended(script, tmp_path):
    flags = ["--dash", "--nproc-per-node", "2", script(WAITING), str(tmp_path)]
    job = Job(tmp_path / "runs", flags)
    try:
        wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)))
        connection = http.client.HTTPConnection("localhost", job.port, timeout=60)
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {job.token}"})
        stream = connection.getresponse()
        wait_until(lambda: len(job.picture()["ranks"]) == 2)
        (tmp_path / "end").touch()
        lines = stream.read().decode().splitlines()
        assert job.process.wait(60) == 0
    finally:
        job.end()
    states = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    ranks = [state["ranks"] for state in states if "ranks" in state][-1]
    assert [(row["state"], row["doing"]) for row in ranks] == [("ended", "")] * 2
    assert states[-1] == {} and lines[-3] == "event: end"
    assert not [line for line in job.lines if not line.startswith("paceline: ")]


def test_the_page_is_off_unless_it_is_asked_for(script, tmp_path):
    before = listening()
    process = subprocess.Popen(
        command("--nproc-per-node", "2", script(WAITING), str(tmp_path)),
        env={**ENVIRONMENT, "PACELINE_RUNS_DIR": str(tmp_path / "runs")},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)))
    assert not [each for each in listening() - before if _listener_of(each) == process.pid]
    (tmp_path / "end").touch()
    assert "token" not in (process.communicate(timeout=60)[1] or "")


def _listener_of(address: str) -> int:
    """Returns the process that listens on an address in /proc/net, or 0 if it cannot be found."""
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] == address and fields[3] == "0A":
                for fd in Path("/proc").glob("[0-9]*/fd/*"):
                    try:
                        if fd.readlink().name == f"socket:[{fields[9]}]":
                            return int(fd.parts[2])
                    except OSError:
                        continue
    return 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dash-port", "8080"], "--dash-port configures the live page, which requires --dash"),
        (["--dash", "--dash-port", "8080", "--dash-socket", "/tmp/x"], "are mutually exclusive"),
        (["--dash", "--dash-prefix", "user/x"], "is not a path such as"),
        (["--dash", "--dash-host", "a:80"], "is not the name of a host"),
        (["--dash", "--dash-socket", "/nowhere/page"], "the directory /nowhere does not exist"),
    ],
)
def test_mistakes_in_the_flags_of_the_page_are_explained(script, flags, said):
    done = run("--nproc-per-node", "1", *flags, script(""))
    assert done.returncode == 2
    assert said in done.stderr
