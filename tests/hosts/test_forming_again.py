"""Groups other than the default group, and later groups on the same hosts, which do not measure the network again."""

from __future__ import annotations

import torch

import paceline as dist
from hosts.talking import rank
from paceline.comm.engine.api import KnownCosts
from paceline.comm.engine.native import cost_measurement
from paceline.comm.group.default import default_world
from paceline.comm.group.init import GroupOptions, form_apart
from paceline.comm.schedule.cost_model import CostModel


def form_again() -> tuple[list[float], list[CostModel]]:
    def refuse(_: object) -> None:
        raise AssertionError("it was measured again")

    dist.init_process_group()
    default = default_world()
    known = KnownCosts()
    sums = []
    for number in range(2):
        place = dist.PrefixStore(f"apart/{number}", default.store)
        world = form_apart(place, rank(), 3, 60.0, GroupOptions(costs=known))
        for group in (world.group, default.group):
            total = torch.ones(1)
            group.all_reduce(total)
            sums.append(total.item())
        world.close()
        cost_measurement.measure = refuse
    dist.barrier()
    dist.destroy_process_group()
    return sums, list(known.models.values())


def test_costs_are_known_to_the_next_group(hosts):
    told = hosts([2, 1])(form_again)
    assert [sums for sums, _ in told] == [[3.0] * 4] * 3
    models = [known for _, known in told]
    assert len(models[0]) == 1
    assert models[0] == models[1] == models[2]
