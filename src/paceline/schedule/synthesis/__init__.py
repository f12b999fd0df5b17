"""Makes the schedule of an all-reduce for a network whose links differ.

`trees.py` packs trees into the network, along which the parts of a tensor are summed and spread; `ordering.py` puts
their transfers into an order, and `emitting.py` turns them into steps of all ranks of the hosts; `choosing.py` proves
the schedules, and simulates whether they are faster than the fixed algorithms. May use: the rest of `schedule`. Start
reading at `trees.py`.
"""
