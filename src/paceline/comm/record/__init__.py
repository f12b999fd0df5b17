"""Recording of a process: its calls, spans and progress, in memory that outlives the process.

This is the lowest layer with state, because all other layers write into it. May use: `paceline._core`, which holds the
memory and its writers (`native/record/`). Start reading at `layout.py`, which describes the memory; `spans.py` and
`log.py` have the functions that users call.
"""
