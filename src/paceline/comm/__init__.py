"""Communication between ranks: stores, rendezvous, schedules, engines, process groups, collectives and recordings.

May use: nothing from `train`, `operate` or `interop`. `group/` defines process groups and the public collectives, and
`functional.py` defines the differentiable collectives. `engine/` runs collectives with the algorithms in `schedule/`.
`rendezvous/` and `store/` are used to form groups. `security/` protects connections, `one_port/` routes them through
one TCP port, and `record/` records the activity of a process. Start reading at `group/`.
"""
