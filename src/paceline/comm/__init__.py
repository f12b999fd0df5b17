"""Communication between ranks: stores, rendezvous, schedules, engines, process groups, collectives and recordings.

May use: nothing of the other storeys. `group/` has process groups and the collectives that users call, `functional.py`
those through which gradients flow, `engine/` runs them, `schedule/` holds the algorithms, `rendezvous/` and `store/`
form groups, `one_port/` and `security/` guard connections, and `record/` is what a process leaves about itself. Start
reading at `group/`.
"""
