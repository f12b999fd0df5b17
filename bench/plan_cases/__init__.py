"""The measurements of `bench/plan.py`: `programs.py` runs on the ranks; `grid.py` has the points and errors."""
