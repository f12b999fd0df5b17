"""`paceline plan`: how fast a script would train on machines that are not there, and what to change.

`measuring/` runs a script on one rank and writes a calibration, `calibration.py` is what that file holds,
`predicting.py` works out a job on a network from it, and `advice.py` tries what could be changed. May use: every layer
but `cli`; only `measuring/` imports torch. Start reading at `predicting.py`.
"""
