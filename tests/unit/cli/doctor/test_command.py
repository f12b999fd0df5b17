"""The command `paceline doctor` for a script."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from healthy_scripts import HEALTHY
from script_findings import findings

from paceline.cli.main import main


def test_the_command_prints_line_reason_and_fix_and_fails(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import paceline as dist\ndist.init_process_group()\nopen('log.txt', 'w').write('done')\n")
    assert main(["doctor", str(path)]) == 1
    told = capsys.readouterr().out
    assert re.search(r' BAD  .*train.py:3: all-ranks-save: open\(..., "w"\) on every rank\n +why: .*\n +fix: ', told)
    assert main(["doctor", "--json", str(path)]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["line"], finding["confidence"], finding["level"]) == (3, "high", "BAD")


def test_findings_with_low_confidence_are_shown_on_request(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import paceline as dist\ndist.init_process_group()\nopen('log.txt', 'a').write('done')\n")
    assert main(["doctor", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0].endswith("train.py: none of the known mistakes was found")
    assert told.splitlines()[1].strip() == "1 more finding has low confidence; show all with --confidence low"
    assert main(["doctor", "--confidence", "low", str(path)]) == 0
    assert re.search(r"note  .*train.py:3: all-ranks-save: .* \(low confidence\)\n +why: ", capsys.readouterr().out)


def test_what_is_no_python_is_said(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("def (:\n")
    assert main(["doctor", str(path)]) == 2
    assert "invalid syntax" in capsys.readouterr().err


@pytest.mark.parametrize("text", HEALTHY.values(), ids=HEALTHY)
def test_what_is_right_is_left_alone(text):
    assert findings(text) == []


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[4] / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_our_examples_have_none_of_them(path):
    assert findings(path.read_text()) == []
