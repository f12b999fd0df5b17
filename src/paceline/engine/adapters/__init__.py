"""Shared parts for engines that rest on a library: the order of calls, schedules over messages, and a diagnosis.

May use: the files of `engine` itself, `schedule`, `store`, `_core`. Start reading at `serial_channel.py`; `executor.py`
runs schedules, `diagnosis.py` finds out why a call failed, and `members.py` waits for the ranks and watches them.
"""
