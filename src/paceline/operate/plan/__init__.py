"""`paceline plan`: prediction of a script's training speed on machines that are not available, with advice.

May use: every layer but `cli`; only `measure/` imports torch. Start reading at `prediction.py`, which predicts a job on
a network from a calibration. `measure/` runs a script on one rank and writes the calibration, `calibration.py` defines
that file, `step_time.py` computes one step, `advice.py` tries changes, and `goodput.py` computes the cost of failures.
"""
