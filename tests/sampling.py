"""How many random examples a test tries: some in the suite, many times as many at night."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("PACELINE_TEST_EXAMPLES", "1"))


def examples(count: int) -> int:
    """`count` in the suite; `make nightly` sets PACELINE_TEST_EXAMPLES, which multiplies it."""
    return count * FACTOR


def use_profile() -> None:
    """The same for tests that say nothing of their number of examples; a busy machine may take its time for each."""
    settings.register_profile(
        "paceline",
        max_examples=examples(settings.default.max_examples),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("paceline")
