"""The measurements of `bench/plan.py`: `programs.py` runs on the ranks; `grid.py` contains the points and errors."""
