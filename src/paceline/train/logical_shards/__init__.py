"""Training whose result has the same bits on any number of ranks.

May use: `group` and below, and the other modules of `parallel`. Start reading at `logical.py`; the order of summation
is in `tree.py`, how the ranks add in that order in `sums.py`, and where random numbers come from in `streams.py`.
"""
