"""The launcher: it starts, watches and ends the worker processes of one machine.

`workers/` holds the worker processes, `multinode/` the cooperation of several machines, `elastic/` the jobs that
replace single workers, and `ssh/` the start on other machines.

May use: all of `comm`, `train.elastic`, `train.checkpoint.peer_memory`, `diagnosis` and `dashboard`; never torch, so
that a launcher starts at once. Start reading at `command.py`, then `job.py`, `worker_group_launcher.py`
and `launcher.py`.
"""
