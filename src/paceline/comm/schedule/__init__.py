"""Schedules for collectives as plain data: each rank's steps, built by an algorithm that a cost model selects.

Schedules are used between hosts, and within a host if an algorithm is forced. Otherwise the ranks on one host use
shared memory directly (native/host). May use: the standard library and the core, but not torch. Start reading at
`steps.py` (the data and its semantics), then `ring.py`. `algorithms.py` lists the algorithms, predicts their durations
and selects one, `verify.py` proves schedules correct, `simulation.py` simulates them on a network, and `synthesis.py`
creates schedules for networks with unequal links.
"""
