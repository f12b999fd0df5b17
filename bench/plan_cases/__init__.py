"""The measurements of `bench/plan.py`: `programs.py` has the programs of the ranks, `grid.py` the points and their
errors.
"""
