"""The worker processes of one machine: their start, environment, output and end.

`forker.py` starts the processes, usually as forks of `template.py`. `bootstrap.py` runs first in each worker, and
`cleanup.py` ensures that no process outlives the launcher.

May use: `diagnosis` and below, and from `launch` the `Job`, its directory and options, and the messages of `multinode`.
Start reading at `start_workers.py` and `worker_group.py`.
"""
