"""Rules about models, data and devices, each with scripts that violate it."""

from __future__ import annotations

import pytest
from planted_mistakes import TRAINING_MISTAKES
from script_findings import require_found_alone

CASES = [(rule, number) for rule, scripts in TRAINING_MISTAKES.items() for number in range(len(scripts))]


@pytest.mark.parametrize(("rule", "number"), CASES, ids=[f"{rule}-{number}" for rule, number in CASES])
def test_a_mistake_is_found_on_its_line_and_nothing_else(rule, number):
    require_found_alone(rule, TRAINING_MISTAKES[rule][number])
