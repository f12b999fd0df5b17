"""How many random examples a test tries: some in the suite, many times as many at night."""

from __future__ import annotations

import os

from hypothesis import settings

FACTOR = int(os.environ.get("PACELINE_TEST_EXAMPLES", "1"))


def examples(count: int) -> int:
    """`count` in the suite; `make nightly` sets PACELINE_TEST_EXAMPLES, which multiplies it."""
    return count * FACTOR


def multiply_the_default() -> None:
    """The same for the tests that say nothing of their number of examples."""
    settings.register_profile("multiplied", settings.default, max_examples=examples(settings.default.max_examples))
    settings.load_profile("multiplied")
