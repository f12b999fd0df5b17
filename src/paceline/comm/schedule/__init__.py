"""Schedules of collectives as plain data: each rank's steps, built by algorithms, among which a cost model chooses.

Schedules run between hosts, or where an algorithm is forced; the ranks of one host use shared memory directly
(native/host). May use: the standard library and the core, no torch. Start reading at `steps.py` (the data and its
meaning), then `ring.py`. `registry.py` lists the algorithms, `cost.py` predicts and chooses, `verify.py` proves
schedules correct, `simulation.py` simulates them on a network, and `synthesis.py` creates schedules for networks with
uneven links.
"""
