"""Launcher: starts, monitors and stops the worker processes on one machine.

`workers/` manages the worker processes, `multinode/` coordinates several machines, `elastic/` runs jobs in which
individual workers are replaced, and `ssh/` starts launchers on other machines.

May use: all of `comm`, `train.elastic`, `train.checkpoint.peer_memory`, `diagnosis` and `dashboard`; never torch,
because a launcher must start quickly. Start reading at `command.py`, then `job.py`, `worker_group_launcher.py` and
`launcher.py`.
"""
