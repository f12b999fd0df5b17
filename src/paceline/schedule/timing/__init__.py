"""Simulates a collective on a network, event by event, with the schedules and the order of steps of the executor.

`crossing.py` says which links a message crosses, `scene.py` lays out what the core simulates (native/simulate), with
equal ranks as one where that is exact, and `calls.py` is the interface. May use: the rest of `schedule`, and the core.
Start reading at `calls.py`.
"""

from paceline.schedule.timing.calls import CallTiming, Transfer, simulate_call, simulate_schedules

__all__ = ["CallTiming", "Transfer", "simulate_call", "simulate_schedules"]
