"""The launcher: it starts, watches and ends the worker processes of one machine.

`workers/` manages the worker processes, `multinode/` coordinates several machines, `elastic/` runs jobs that replace
single workers, and `ssh/` starts launchers on other machines.

May use: all of `comm`, `train.elastic`, `train.checkpoint.peer_memory`, `diagnosis` and `dashboard`; never torch, so
that a launcher starts at once. Start reading at `command.py`, then `job.py`, `worker_group_launcher.py` and
`launcher.py`.
"""
