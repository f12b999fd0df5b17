"""The steps of `bench/gpu.py`: programs that compare Paceline with torch.distributed on a device.

`catalog.py` lists the steps in order. `session.py` forms both process groups of a rank and provides the programs with
streams. The other modules contain the programs, grouped by subject. The programs do not print. Each program returns the
figures of its step, and raises an error if Paceline's results are wrong. Start reading at `catalog.py`.
"""
