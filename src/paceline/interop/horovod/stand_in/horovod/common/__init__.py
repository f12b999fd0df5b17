"""The parts that Horovod's interfaces for all libraries have in common.

May use: `paceline.horovod`. Start reading at `exceptions.py`.
"""
