"""The command `paceline plan`."""

from __future__ import annotations

import json
import subprocess
import sys

from planned import calibration

from paceline.cli.main import main
from paceline.operate.plan.calibration import encode


def test_the_command_says_what_failures_cost(tmp_path, capsys):
    path = tmp_path / "calibration.json"
    path.write_bytes(encode(calibration()))
    words = ["plan", str(path), "--nodes", "2,4", "--failures", "machine=30d,worker=90d"]
    assert main(words) == 0
    assert "If 1 of 4 nodes is cut off, the other 3 continue after" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["failures"]
    assert [each["nodes"] for each in facts] == [2, 4] and all(0.9 < each["elastic_share"] <= 1 for each in facts)
    assert main([*words[:-1], "machine=never"]) == 2
    assert "is not a duration" in capsys.readouterr().err


def test_a_plan_without_a_calibration_says_so(capsys, tmp_path):
    assert main(["plan"]) == 2
    assert "pass one calibration" in capsys.readouterr().err
    assert main(["plan", "--measure"]) == 2
    assert "the script to measure follows the flags" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_predicting_needs_no_torch():
    modules = "paceline.operate.plan.report, paceline.operate.plan.prediction, paceline.cli.plan"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
