"""Process groups: the ranks that take part in collectives, and the functions that create, query and end groups.

May use: `engine` and below; not `group/collectives`, whose public calls use this folder. Start reading at
`process_group.py`, which passes calls to the engine; `call_plan.py` checks unusual arguments. `init.py` creates and
ends groups, `default.py` holds the default group.
"""
