"""Measurement of a script: hooks record its times while it runs on ranks that do not communicate.

May use: `paceline.comm`, `paceline.train`, `operate/diagnosis` and the rest of `plan`; unlike the latter, this folder
imports torch. Start reading at `worker.py`, the program that the launcher starts. It measures the links to the other
ranks (`links.py`), and then runs the script under a `StepWatch` (`step_watch.py`), which yields the calibration.
"""
