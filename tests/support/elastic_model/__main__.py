"""Runs one schedule and prints its events: `PYTHONPATH=tests:tests/support python -m elastic_model [realm] SEED`."""

from __future__ import annotations

import sys

from elastic_model.realm import Realm
from elastic_model.world import World

world = Realm(int(sys.argv[2])) if sys.argv[1] == "realm" else World(int(sys.argv[1]))
world.log = []
print(world.policy, f"{world.rounds} rounds, {world.batch} a batch; faults after so many events: {world.faults[::-1]}")
try:
    world.run()
finally:
    print("\n".join(world.log))
print(world.history() if isinstance(world, Realm) else world.over)
