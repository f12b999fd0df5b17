"""DiLoCo and local SGD for slow networks: ranks train independently and average their parameters every few steps.

May use: `paceline.comm`, `train.zero`, `train.shared_model` and the modules directly in `train`. Start reading at
`diloco.py`. `exchange_scheduler.py` schedules exchanges and selects their participants, using state machines that
perform no I/O and do not read the clock. `exchanges.py` runs the exchanges on a background thread during training.
"""
