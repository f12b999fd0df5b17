"""The worker processes of one machine: their start, their environment, their output and their end.

May use: `diagnosis` and below. Start reading at `start_workers.py` and `worker_group.py`; `bootstrap.py` is what runs
first in a worker, and `cleanup.py` makes sure that nothing outlives the launcher.
"""
