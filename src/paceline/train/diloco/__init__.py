"""DiLoCo and local SGD, for slow networks: ranks train independently and average their parameters once in many steps.

May use: `paceline.comm`, `train.zero`, `train.shared_model` and the modules of `train`. Start reading at `diloco.py`.
`exchange_timetable.py` schedules exchanges and selects their participants, in state machines without communication or a
clock. `exchanges.py` runs the exchanges on a separate thread during training.
"""
