"""Starts, watches and ends worker processes, on one machine or, with the others that meet in `nodes/`, on several.

May use: `store`, `one_port`, `security`, `checkpoint.copies`, `errors`, `routes`; never torch, so that a launcher
starts at once. Start reading at `agent.py`; the commands in `command.py` lead there.
"""
