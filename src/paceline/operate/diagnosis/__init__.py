"""Diagnosis of jobs that hang, fail or run slowly, based on their processes' recordings, during or after the job.

May use: `comm.record`, which defines the layout of recordings, `comm.schedule`, which defines the algorithms' names,
and `comm.security`. It does not import torch, so the launcher and the command line can use it. Start reading at
`recording.py` and `recording_reader.py` for the data, and at `job_snapshot.py` and `diagnosis.py` for the conclusions.
"""
