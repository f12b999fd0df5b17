"""Measures a script: it runs on one rank, which waits for nobody, while hooks note when each gradient is there.

`worker.py` is the program that the launcher starts; it measures the links with the other ranks (`links.py`) and then
runs the script under a `StepWatch` (`watching.py`), whose notes `summing.py` turns into a calibration. May use: `group`
and below, `parallel`, `observe`, and what is in `plan` itself; unlike the rest of `plan`, this folder imports torch.
Start reading at `worker.py`.
"""
