"""Reads what the processes of a job recorded, while they run or afterwards, and says why a job hangs, fails or is slow.

May use: `record`, which says how a recording is laid out, and `schedule`, for the algorithms' names. It imports no
torch, so that the launcher and the command may use it. Start reading at `recording.py`, what a recording is, and
`reading.py`; for the diagnosis at `evidence.py`, what is known, and `diagnosis.py`.
"""
