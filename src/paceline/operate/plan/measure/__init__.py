"""Script measurement: hooks record a script's times while it runs on ranks that do not communicate.

May use: `paceline.comm`, `paceline.train`, `operate/diagnosis` and the rest of `plan`. Only this folder of `plan`
imports torch. Start reading at `worker.py`, the program that the launcher starts. It measures the links to the other
ranks (`links.py`), then runs the script under a `StepWatch` (`step_watch.py`) and computes the calibration.
"""
