"""`paceline plan`: predicts a script's training speed on machines that are not available, and suggests improvements.

May use: every layer except `cli`; only `measure_worker.py` and `step_watch.py` import torch. Start reading at
`prediction.py`, which predicts a job's speed and the effects of changes from a calibration and a network. The launcher
starts the program `measure_worker.py`, which measures the links, runs a script under a `StepWatch` (`step_watch.py`),
and computes the calibration. `calibration.py` defines the calibration file, `step_time.py` computes the duration of one
step, and `goodput.py` computes the cost of failures.
"""
