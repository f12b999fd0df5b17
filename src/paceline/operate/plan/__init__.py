"""`paceline plan`: predicts a script's training speed on machines that are not available, and suggests improvements.

May use: every layer except `cli`; only `measure/` imports torch. Start reading at `prediction.py`, which predicts a job
on a network from a calibration. `measure/` runs a script on one rank and writes the calibration, `calibration.py`
defines that file, `step_time.py` computes the duration of one step, `advice.py` tries changes, and `goodput.py`
computes the cost of failures.
"""
