"""Shared parts for engines that rest on a library: the order of calls, schedules over messages, and a diagnosis.

May use: the files of `engine` itself, `schedule`, `store`, `_core`. Start reading at `library_engine.py`, the base of
such an engine, and `serial_channel.py`, the base of its channels; `executor.py` runs schedules, `diagnosis.py` finds
out why a call failed, and `members.py` waits for the ranks and watches them.
"""
