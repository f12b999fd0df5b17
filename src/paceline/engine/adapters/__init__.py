"""What an engine over another library need not write again: the order of calls, schedules over messages, diagnosis.

May use: `engine/api.py`, `engine/failures.py`, `schedule`, `store`. Start reading at `serial_channel.py`.
"""
