"""The pictures in docs are those that the code beside them draws."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
DRAWN = runpy.run_path(str(PICTURES / "data_parallel.py"))["PICTURES"]


@pytest.mark.parametrize("name", list(DRAWN))
def test_a_picture_is_what_its_script_draws(name):
    drawn = DRAWN[name]().svg()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert (PICTURES / name).read_text() == drawn
