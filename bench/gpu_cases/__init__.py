"""Steps of `bench/gpu.py`: programs of ranks that compare Paceline with torch.distributed on a device.

`catalogue.py` lists the steps in their order. `session.py` forms both process groups of a rank and gives the programs
streams. The other modules hold the programs, by what they show. Nothing here prints: a program returns the figures of
its step, and raises where Paceline is wrong. Start reading at `catalogue.py`.
"""
