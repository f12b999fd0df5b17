"""What deaths cost a job: the elastic part's own coordinator, with workers and failures in virtual time.

`workers.py` is a worker as the coordinator sees one, `job.py` plays a job with failures, and `goodput.py` sums up many
of them, beside a job that restarts from checkpoints. May use: `elastic` and the rest of `plan`, and no torch. Start
reading at `goodput.py`.
"""
