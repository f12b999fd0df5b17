"""Parts shared by engines that wrap a library: call ordering, schedules over messages, and failure diagnosis.

May use: the files in `engine` itself, `schedule`, `store`, `_core`. Start reading at `library_engine.py`, the base
class for these engines, and `serial_channel.py`, the base class for their channels; `schedule_executor.py` runs
schedules, and `group_recorder.py` records calls.
"""
