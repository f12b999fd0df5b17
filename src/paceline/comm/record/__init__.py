"""Recording of a process: its calls, spans and progress, in memory that outlives it.

This is the lowest layer with state, because every other one writes into it. May use: `paceline._core`, which holds the
memory and its writers (`native/record/`). Start reading at `layout.py`, which describes the memory; `spans.py` and
`log.py` have the functions that users call.
"""
