"""Rules about calls that differ between ranks, each with scripts that violate it."""

from __future__ import annotations

import pytest
from planted_mistakes import RANK_MISTAKES
from script_findings import findings, require_found_alone

CASES = [(rule, number) for rule, scripts in RANK_MISTAKES.items() for number in range(len(scripts))]


@pytest.mark.parametrize(("rule", "number"), CASES, ids=[f"{rule}-{number}" for rule, number in CASES])
def test_a_mistake_is_found_on_its_line_and_nothing_else(rule, number):
    require_found_alone(rule, RANK_MISTAKES[rule][number])


def test_a_message_names_the_ranks_and_the_line_of_the_test():
    text = "import paceline as dist\ndist.init_process_group()\nif dist.get_rank() < 2:\n    dist.barrier()\n"
    (found,) = findings(text)
    assert found.seen == "barrier()"
    assert found.reason.startswith("only the ranks below 2 would make this call (the test is on line 3)")
    assert found.fix == "move the call out of the branch, so that all ranks make it"


def test_findings_on_one_line_are_in_the_order_of_the_calls():
    calls = ["get_rank()", "barrier()", "get_world_size()", "all_reduce(t)", "broadcast(t, 0)"]
    text = f"import paceline as dist\nprint({', '.join(f'dist.{call}' for call in calls)})\ndist.init_process_group()\n"
    seen = [found.seen.partition("(")[0] for found in findings(text) if found.about == "before-init"]
    assert seen == [call.partition("(")[0] for call in calls]
