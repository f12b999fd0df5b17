"""A diagram of a schedule shows every message; the command rejects schedules that cannot be drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from paceline.cli.main import main
from paceline.comm.schedule.algorithms import ALGORITHMS
from paceline.comm.schedule.call_diagram import draw_call
from paceline.comm.schedule.network import Network, NetworkLink
from paceline.comm.schedule.steps import Operation

SVG = "{http://www.w3.org/2000/svg}"
LINK = NetworkLink(1e-4, 1e9)


def run(*flags):
    return main(["plan", *flags])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_drawn(algorithm):
    network = Network.uniform(2, 2, node=LINK, within_host=LINK)
    for operation in ALGORITHMS[algorithm]:
        root = ElementTree.fromstring(draw_call(algorithm, operation, 1 << 20, network))
        assert root.tag == f"{SVG}svg"
        assert root.findall(f"{SVG}polygon")


def test_a_ring_has_a_band_for_each_message():
    network = Network.uniform(4, 1, node=LINK, within_host=LINK)
    root = ElementTree.fromstring(draw_call("ring", Operation.ALL_REDUCE, 4000, network))
    bands = root.findall(f"{SVG}polygon")
    assert len(bands) == 4 * 6
    said = [band.findtext(f"{SVG}title") for band in bands]
    assert "rank 0 to rank 1: block 3, 1,000 bytes, 0 us to 101 us" in said


def test_the_command_writes_a_file_or_prints(tmp_path, capsys):
    assert run("--draw", "tree", "--ranks", "4", "--per-node", "2", "-o", str(tmp_path / "tree.svg")) == 0
    assert ElementTree.parse(tmp_path / "tree.svg").getroot().tag == f"{SVG}svg"
    capsys.readouterr()
    assert run("--draw", "ring", "--operation", "broadcast", "--links", "node=1gbit,1ms") == 0
    assert capsys.readouterr().out.startswith("<svg")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--draw", "rign"], "unknown algorithm 'rign'"),
        (["--draw", "ring", "--operation", "sum"], "unknown operation 'sum'"),
        (["--draw", "ring", "--ranks", "65"], "a diagram of 65 ranks would not be legible"),
        (["--draw", "ring", "--ranks", "9", "--per-node", "2"], "9 ranks cannot be divided"),
        (["--draw", "ring", "--ranks", "60"], "7,080 messages"),
        (["--draw", "ring", "--links", "region=1gbit"], "does not describe the links between nodes"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_reason(flags, why, capsys):
    assert run(*flags) == 2
    assert why in capsys.readouterr().err
