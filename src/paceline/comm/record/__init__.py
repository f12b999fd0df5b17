"""What this process does, written into memory that outlives it: its calls, its spans and its progress.

The lowest layer with state, because every other one writes into it. May use: `paceline._core`, which holds the memory
and its writers (`native/record/`). Start reading at `layout.py`, which describes the memory; `names.py` lists what its
numbers mean.
"""
