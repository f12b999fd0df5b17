"""Plays one schedule and prints what happens: `PYTHONPATH=tests python -m elastic_model SEED`."""

from __future__ import annotations

import sys

from elastic_model.world import World

world = World(int(sys.argv[1]))
world.log = []
print(world.policy, f"{world.rounds} rounds, {world.batch} a batch; faults after so many events: {world.faults[::-1]}")
try:
    world.run()
finally:
    print("\n".join(world.log))
print(world.over)
