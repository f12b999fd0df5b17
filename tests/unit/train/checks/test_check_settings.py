"""Selection of checks through an argument or an environment variable."""

from __future__ import annotations

import pytest

from paceline.train.checks.check_settings import Checks, choose_checks


@pytest.mark.parametrize(
    ("argument", "variable", "chosen"),
    [
        (None, None, Checks(True)),
        (None, "off", Checks(False)),
        (None, "500", Checks(True, 500)),
        (True, "off", Checks(True)),
        (False, "on", Checks(False)),
        (0, None, Checks(False)),
        (20, None, Checks(True, 20)),
    ],
)
def test_the_argument_prevails_over_the_variable(monkeypatch, argument, variable, chosen):
    monkeypatch.delenv("PACELINE_CHECKS", raising=False)
    if variable is not None:
        monkeypatch.setenv("PACELINE_CHECKS", variable)
    assert choose_checks(argument) == chosen


@pytest.mark.parametrize(("argument", "variable"), [(-1, "on"), (None, "0"), (None, "often")])
def test_values_that_mean_nothing_are_refused(monkeypatch, argument, variable):
    monkeypatch.setenv("PACELINE_CHECKS", variable)
    with pytest.raises(ValueError, match="steps from one comparison of the replicas to the next"):
        choose_checks(argument)
