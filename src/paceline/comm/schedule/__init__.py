"""Schedules say, as plain data, what each rank does in a collective; algorithms make them, a cost model chooses.

They run between hosts, or where an algorithm is forced: one host's ranks use shared memory directly (native/host).
May use: the standard library and the core, no torch. Start reading at `steps.py` (the data and what it means), then
`ring.py`; `registry.py` lists the algorithms, `cost.py` predicts and chooses, `verify/symbolic.py` proves schedules
right, `timing/` simulates them on a network, and `synthesis/` makes one for uneven links.
"""
