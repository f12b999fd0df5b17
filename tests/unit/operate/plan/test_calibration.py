"""The calibration file, measurements of steps, and the output of the command and its report."""

from __future__ import annotations

import pytest
from planned import calibration

from paceline.operate.plan.calibration import CalibrationError, decode, encode, read, relative_spread


def test_a_calibration_survives_its_file(tmp_path):
    found = calibration()
    path = tmp_path / "calibration.json"
    path.write_bytes(encode(found))
    assert read(path) == found
    assert '"forward_s": 0.015' in path.read_text()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"version": 1', '"version": 2', "has version 2, but this version of Paceline reads 1; measure again"),
        ('"forward_s": 0.015', '"forward_s": "fast"', r"Expected `float`, got `str` - at `\$.times.forward_s`"),
        ('"forward_s": 0.015', '"forward_s": -1', "a time or a size is negative"),
        ('"forwards": 1', '"forwards": 0', "forwards must be at least 1"),
        ("{", "", "is not a calibration written by `paceline plan --measure`"),
    ],
)
def test_a_wrong_calibration_says_what_is_wrong(old, new, complaint):
    content = encode(calibration()).decode()
    assert old in content
    with pytest.raises(CalibrationError, match=complaint):
        decode(content.replace(old, new, 1).encode(), "calibration.json")


def test_the_spread_is_relative_to_the_median():
    assert relative_spread([2.0, 1.0, 4.0]) == [0.5, 1.0, 2.0]
    assert relative_spread([1.0, 3.0, 2.0, 2.0], in_a_row=2) == [1.0, 1.0]
    assert relative_spread([1.0], in_a_row=16) == [1.0]
