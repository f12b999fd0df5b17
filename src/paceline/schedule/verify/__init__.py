"""The proof that a schedule is right, and its time on a given network; nothing here runs in a collective.

May use: `schedule`. Start reading at `symbolic.py`; `simulate.py` has the clock.
"""
