"""The parts of Horovod that are common to its interfaces for all frameworks.

May use: `paceline.horovod`. Start reading at `exceptions.py`.
"""
