"""Power loss after each disk operation; data that was not synced is dropped, truncated or reordered.

The newest checkpoint that was reported as complete is always intact, and has the numbers of one step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from checkpoint_disks import Operation, TracingDisk
from checkpoint_power import NodePlace, after_power_loss
from checkpoint_states import newest_whole, save, steps_in
from sampling import examples

from paceline.train.checkpoint.format.local_storage import LocalStorage
from paceline.train.checkpoint.format.root import Root

STEPS = (1, 2, 3, 3, 4)


@dataclass(frozen=True)
class Trace:
    """The operations of several saves, and the number of operations before each report."""

    operations: list[Operation]
    reported: dict[str, int]
    top: str


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    top = tmp_path_factory.mktemp("traced")
    disk = TracingDisk()
    root = Root(LocalStorage(top / "run", disk))
    reported = {}
    for step in STEPS:
        name = save(root, step)
        reported[name] = len(disk.operations)
        root.retire(2)
    return Trace(disk.operations, reported, str(top))


def losses(trace: Trace, number: int, chance: random.Random):
    """Generates ways in which operations that were not synced may survive."""
    yield lambda index: False
    yield lambda index: True
    yield lambda index: index == number - 1
    yield lambda index: index != number - 2
    for _ in range(examples(4)):
        drawn = [chance.random() < 0.5 for _ in range(number)]
        yield drawn.__getitem__


def check(trace: Trace, number: int, root: Root) -> None:
    """Checks that the newest complete checkpoint is the last reported one, or a later one."""
    reported = [name for name, done in trace.reported.items() if done <= number]
    found, _ = newest_whole(root, digests=True)
    if found is None:
        assert not reported
        return
    names = list(trace.reported)
    assert names.index(found.name) >= len(reported) - 1
    assert steps_in(root, found.name) == {found.step} == {STEPS[names.index(found.name)]}


def test_a_reported_checkpoint_survives_every_loss_of_power(trace):
    chance = random.Random(1)
    assert len(trace.operations) > 150
    for number in range(len(trace.operations) + 1):
        for survives in losses(trace, number, chance):
            left = after_power_loss(trace.operations[:number], trace.top, survives, chance)
            check(trace, number, Root(Below(left)))


class Below(NodePlace):
    """The root's directory within the traced directory."""

    def _find(self, name: str):
        return super()._find(f"run/{name}")


def test_saves_go_on_after_a_loss_of_power(trace, tmp_path):
    chance = random.Random(2)
    for number in range(0, len(trace.operations), 7):
        drawn = [chance.random() < 0.5 for _ in range(number)]
        left = after_power_loss(trace.operations[:number], trace.top, drawn.__getitem__, chance)
        directory = tmp_path / str(number)
        directory.mkdir()
        NodePlace(left).write_to(directory)
        root = Root(directory / "run")
        name = save(root, 99)
        found, _ = newest_whole(root, digests=True)
        assert found is not None and found.name == name and steps_in(root, name) == {99}
        root.retire(1)
        assert not [each for each in root.storage.names() if each.startswith(".")]


@pytest.mark.parametrize("omitted", ["sync", "sync_directory"])
def test_the_check_notices_saves_that_do_not_sync(trace, omitted):
    """Without this test, a check that never fails would not be detected."""
    chance = random.Random(3)
    numbers = {
        number: sum(each.kind != omitted for each in trace.operations[:number]) for number in trace.reported.values()
    }
    operations = [each for each in trace.operations if each.kind != omitted]
    with pytest.raises(AssertionError):
        for number, fewer in numbers.items():
            left = after_power_loss(operations[:fewer], trace.top, lambda index: False, chance)
            check(trace, number, Root(Below(left)))
