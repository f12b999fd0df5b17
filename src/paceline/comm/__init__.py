"""Communication between ranks: stores, rendezvous, schedules, engines, process groups, collectives and recordings.

May use: nothing of the other storeys. `group/` has process groups and the collectives that users call, `functional.py`
the differentiable collectives, `engine/` runs them, `schedule/` holds the algorithms, `rendezvous/` and `store/` form
groups, `one_port/` and `security/` protect connections, and `record/` records the activity of a process. Start reading
at `group/`.
"""
