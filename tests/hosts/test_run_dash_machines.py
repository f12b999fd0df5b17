"""The live page of a job on several machines shows the ranks, output and links of all machines."""

from __future__ import annotations

import http.client
import json
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dash_training import TRAIN
from launching import wait_until

from hosts.fixture import skip_where_not_permitted
from hosts.machines import Machines
from hosts.network import ipv4
from paceline.cli.top.client import PageAddress, picture

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TALK = """
import os, sys, time, torch
import paceline as dist

dist.init_process_group()
print(f"rank {dist.get_rank()} talks", flush=True)
model = dist.DistributedDataParallel(torch.nn.Linear(32, 1))
for step in range(10_000):
    model(torch.randn(8, 32)).square().mean().backward()
    time.sleep(0.05)
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if step == 20 and is_first and sys.argv[1:] == ["fail"] and dist.get_rank() == 1:
        raise ValueError("told to fail")
"""

SLOW = """
import torch
import paceline as dist

dist.init_process_group()
tensor = torch.ones(1 << 18)
for _ in range(5):
    dist.all_reduce(tensor)
"""


@contextmanager
def job_on_two(script: str, *arguments: str, flags: tuple[str, ...] = ()) -> Iterator[tuple[PageAddress, str]]:
    """Runs a script on two machines with one rank each; yields the page's address and its Unix socket."""
    skip_where_not_permitted()
    with tempfile.TemporaryDirectory() as directory:
        here = Machines(2)
        try:
            here.script.write_text(script)
            path = str(Path(directory, "page"))
            place = ["--nnodes", "2", "--master-addr", ipv4(0), "--master-port", "29400"]
            command = [str(here.script), *arguments]
            second = here.start(1, *place, "--node-rank", "1", *command)
            first = here.start(0, *place, "--node-rank", "0", "--dash", "--dash-socket", path, *flags, *command)
            wait_until(lambda: "?token=" in here.said(first, "err"))
            found = re.search(r"\?token=(\w+)", here.said(first, "err"))
            assert found is not None and "?token=" not in here.said(second, "err")
            yield PageAddress(found[1], path=path), path
        finally:
            here.close()


def test_the_page_shows_the_ranks_of_both_machines():
    with job_on_two(TRAIN) as (address, _):
        told: dict = {}

        def both_are_shown() -> bool:
            told.update(picture(address))
            at_work = [row["rank"] for row in told["ranks"] if row["state"] == "training" and row["compute"] > 0]
            return at_work == [0, 1] and len(told["steps"]["items"]) > 3 and len(told["links"]) == 2

        wait_until(both_are_shown)
        assert [row["host"] for row in told["ranks"]] == ["h0", "h1"]
        assert [lane["rank"] for lane in told["timeline"]["lanes"]] == [0, 1]
        assert [(link["rank"], link["peer"], link["kind"]) for link in told["links"]] == [(0, 1, "TCP"), (1, 0, "TCP")]
        assert all(link["round_trip"] > 0 and link["retransmits"] >= 0 for link in told["links"])


def test_output_stacks_and_events_of_all_machines_are_shown():
    with job_on_two(TALK, flags=("--dash-actions",)) as (address, path):

        def texts(name: str) -> list[str]:
            return [each["text"] for each in picture(address)[name]["items"]]

        wait_until(lambda: {"rank 0 talks", "rank 1 talks"} <= set(texts("log")))
        lines = picture(address)["log"]["items"]
        assert {line["rank"] for line in lines if line["text"] == "rank 1 talks"} == {1}
        wait_until(lambda: {"worker 0 started", "worker 1 started"} <= set(texts("events")))
        wait_until(lambda: len(picture(address)["ranks"]) == 2)
        assert act(path, address.token).endswith("and requested those of the other machines")
        wait_until(lambda: [each["rank"] for each in picture(address)["stacks"]] == [0, 1])
        assert all("worker.py:" in each["text"] for each in picture(address)["stacks"])


def test_a_failure_on_another_machine_is_an_event_here():
    with job_on_two(TALK, "fail", flags=("--max-restarts", "1")) as (address, _):

        def is_told() -> bool:
            told = picture(address)
            texts = [each["text"] for name in ("events", "log") for each in told[name]["items"]]
            is_event = any(re.fullmatch(r"rank 1 \(process \d+\): .+", text) for text in texts)
            return is_event and "ValueError: told to fail" in texts

        wait_until(is_told)


def act(path: str, token: str) -> str:
    """Requests the stacks from the page on a Unix socket; returns its response."""
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(path)
    headers = {"Authorization": f"Bearer {token}", "X-Paceline-Action": "stacks"}
    connection.request("POST", "/actions/stacks", headers=headers)
    try:
        return json.loads(connection.getresponse().read())["report"]
    finally:
        connection.close()


def test_the_slow_link_of_three_machines_is_named():
    skip_where_not_permitted()
    said = ""
    for _ in range(3):  # if the cores are busy, the other links may appear equally slow
        said = told_of_a_slow_link()
        assert "the network between h0, h1, h2 took" in said, said
        if re.search(r"the slowest link is that from h1 to h[02] \(rank 1 to rank [02]\): [\d.]+ MB/s", said):
            return
    pytest.fail(said)


def told_of_a_slow_link() -> str:
    """Returns the output of rank 0's launcher for a job on three machines, one of which has a slow link."""
    here = Machines(3)
    try:
        here.script.write_text(SLOW)
        here.network.slow_down(1, "16mbit")
        place = ["--nnodes", "3", "--master-addr", ipv4(0), "--master-port", "29400", "--stall-after", "1"]
        launchers = [here.start(host, *place, "--node-rank", str(host), str(here.script)) for host in range(3)]
        wait_until(lambda: all(launcher.poll() is not None for launcher in launchers))
        return here.said(launchers[0], "err")
    finally:
        here.close()
