"""Operations and steps of schedules."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.comm.schedule.steps import Operation


def test_operations_have_the_names_and_numbers_of_the_core():
    header = Path(__file__).parents[4] / "native" / "call" / "call.hpp"
    words = re.search(r"enum class Operation : std::uint8_t \{(.*?)\}", header.read_text(), re.DOTALL)
    assert words and [word.strip() for word in words[1].split(",")][:-1] == ["none", *map(str, Operation)]
    assert list(Operation) == list(range(1, len(Operation) + 1))
