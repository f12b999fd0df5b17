"""Steps of `bench/gpu.py`: programs for ranks that compare Paceline with torch.distributed on a device.

`catalog.py` lists the steps in order. `session.py` forms both process groups of a rank and provides the programs with
streams. The other modules contain the programs, grouped by subject. Nothing here prints: a program returns the figures
of its step, and raises an error if Paceline is wrong. Start reading at `catalog.py`.
"""
