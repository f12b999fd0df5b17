"""Ranks that train by themselves and average now and then: DiLoCo, and local SGD, for slow networks.

May use: `group` and below, and the other modules of `parallel`. Start reading at `diloco.py`. `course.py` says when a
part of the parameters is exchanged and when the result is used, and `roll.py` who takes part in an exchange; both are
state machines without communication or a clock. `exchanges.py` runs them on a thread beside the training.
"""
