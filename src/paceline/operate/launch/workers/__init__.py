"""Worker processes on one machine: their startup, environment, output and exit.

`forker.py` starts the processes, usually by forking `template.py`. `bootstrap.py` runs first in each worker, and
`cleanup.py` ensures that no process outlives the launcher.

May use: `diagnosis` and lower layers, and from `launch` the `Job`, its directory and options, the failures, and the
messages in `multinode`. Start reading at `start_workers.py` and `worker_group.py`.
"""
