"""Sets the number of random examples that a test tries: few in the suite, many in the nightly run."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("PACELINE_TEST_EXAMPLES", "1"))


def examples(count: int) -> int:
    """Returns `count` times PACELINE_TEST_EXAMPLES, which is 1 in the suite; `make nightly` sets this variable."""
    return count * FACTOR


def use_profile() -> None:
    """Sets the default number of examples, without a time limit for each, because the machine may be busy.

    In the suite, a test tries the same examples each time, so that unrelated changes do not cause failures; in the
    nightly run, the examples are random.
    """
    settings.register_profile(
        "paceline",
        max_examples=examples(settings.default.max_examples),
        deadline=None,
        derandomize=FACTOR == 1,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("paceline")
