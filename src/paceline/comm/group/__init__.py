"""Process groups, and the collectives that users call on them.

May use: `engine` and below. Start reading at `collectives.py` and `rooted.py`, the public calls; they become calls of
the engine in `planning.py`, `process_group.py` and `running.py`. `persistent.py` has calls that are prepared once.
`init.py` makes and ends groups, `default.py` holds the default group, and `objects/` sends Python objects.
"""
