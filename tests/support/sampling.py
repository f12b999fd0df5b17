"""How many random examples a test tries: some in the suite, many times as many at night."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("PACELINE_TEST_EXAMPLES", "1"))


def examples(count: int) -> int:
    """`count` in the suite; `make nightly` sets PACELINE_TEST_EXAMPLES, which multiplies it."""
    return count * FACTOR


def use_profile() -> None:
    """The same for tests that say nothing of their number of examples; a busy machine may take its time for each.

    In the suite a test tries the same examples each time, so that no change is held up by what it has nothing to do
    with; at night they are others each time.
    """
    settings.register_profile(
        "paceline",
        max_examples=examples(settings.default.max_examples),
        deadline=None,
        derandomize=FACTOR == 1,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("paceline")
