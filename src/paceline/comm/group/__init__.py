"""Process groups, and the functions that create, query and destroy them.

May use: `engine` and the layers below it, but not `group/collectives`, whose public calls use this folder. Start
reading at `process_group.py`, which passes calls to the engine; `call_plan.py` checks unusual arguments. `init.py`
creates and destroys groups, and `default.py` holds the default group.
"""
