"""Rules about calls that differ between ranks, each with scripts that violate it."""

from __future__ import annotations

import pytest
from planted_mistakes import RANK_MISTAKES
from script_findings import findings, require_found_alone

from paceline.cli.doctor import Confidence
from paceline.cli.doctor.command import check_script
from paceline.cli.doctor.script import library_call

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


LOADER = """
import paceline as dist
from torch.utils.data import DataLoader
{before}
dist.init_process_group()
loader = DataLoader([1, 2], num_workers=2, shuffle=False{options})
{guard}
for batch in loader:
    print(batch)
"""


@pytest.mark.parametrize(
    ("is_default", "options", "before", "confidence"),
    [
        (True, "", "", Confidence.HIGH),
        (False, "", "", Confidence.LOW),
        (True, "", "torch.multiprocessing.set_start_method('fork')", Confidence.LOW),
        (False, ", multiprocessing_context='spawn'", "", Confidence.HIGH),
        (True, ", multiprocessing_context='fork'", "", None),
    ],
)
def test_loader_processes_that_import_the_script(monkeypatch, is_default, options, before, confidence):
    monkeypatch.setattr(library_call, "FORKSERVER_IS_DEFAULT", is_default)
    text = LOADER.format(options=options, before=before, guard="")
    found = [each.confidence for each in check_script(text) if each.about == "no-main-guard"]
    assert found == ([] if confidence is None else [confidence])


def test_loader_processes_that_import_a_guarded_script(monkeypatch):
    monkeypatch.setattr(library_call, "FORKSERVER_IS_DEFAULT", True)
    text = LOADER.format(options="", before="", guard="if __name__ == '__main__':").replace("\nfor", "\n    for")
    text = text.replace("\n    print", "\n        print")
    assert not [each for each in check_script(text) if each.about == "no-main-guard"]
