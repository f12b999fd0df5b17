"""Diagnosis of a job that hangs, fails or is slow, from the recordings of its processes, live or afterwards.

May use: `comm.record`, which has the layout of recordings, `comm.schedule`, for the algorithms' names, and
`comm.security`. It imports no torch, so the launcher and the command can use it. Start reading at `recording.py` and
`recording_reader.py` for the data, and at `job_snapshot.py` and `diagnosis.py` for the conclusions.
"""
