"""The live page of a job on two machines shows the ranks of both, while somebody looks."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from dash_training import TRAIN
from launching import wait_until

from hosts.fixture import skip_where_not_permitted
from hosts.machines import Machines
from hosts.network import ipv4
from paceline.cli.top.client import Address, picture

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def test_the_page_shows_the_ranks_of_both_machines():
    skip_where_not_permitted()
    with tempfile.TemporaryDirectory() as directory:
        here = Machines(2)
        try:
            here.script.write_text(TRAIN)
            socket = Path(directory, "page")
            place = ["--nnodes", "2", "--master-addr", ipv4(0), "--master-port", "29400"]
            second = here.start(1, *place, "--node-rank", "1", str(here.script))
            first = here.start(0, *place, "--node-rank", "0", "--dash", "--dash-socket", str(socket), str(here.script))
            wait_until(lambda: "?token=" in here.said(first, "err"))
            found = re.search(r"\?token=(\w+)", here.said(first, "err"))
            assert found is not None and "?token=" not in here.said(second, "err")
            address = Address(found[1], path=str(socket))

            told: dict = {}

            def both_are_shown() -> bool:
                told.update(picture(address))
                at_work = [row["rank"] for row in told["ranks"] if row["state"] == "training" and row["compute"] > 0]
                return at_work == [0, 1] and len(told["steps"]["items"]) > 3

            wait_until(both_are_shown)
            assert [row["host"] for row in told["ranks"]] == ["h0", "h1"]
            assert [lane["rank"] for lane in told["timeline"]["lanes"]] == [0, 1]
        finally:
            here.close()
