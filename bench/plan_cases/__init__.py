"""What `bench/plan.py` measures: `programs.py` is what ranks run, `grid.py` the points and their errors."""
