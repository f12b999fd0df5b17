"""Recording of a process's calls, spans and progress in memory that outlives the process.

All other layers write to the recording, so this is the lowest layer. May use: `paceline._core`, which contains the
memory and its writers (`native/record/`). Start reading at `layout.py`, which describes the memory; `spans.py` and
`log.py` contain the public functions.
"""
