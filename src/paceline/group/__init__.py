"""Process groups and the collectives as users call them.

May use: `engine` and below. Start reading at `process_group.py`; the calls are in `collectives.py`.
"""
