"""Starts a job's launchers on several machines by ssh: `paceline run --hosts a:4,b:4`.

May use: the rest of `launch`. Start reading at `remote_launch.py`, the state machine; `ssh_launcher.py` performs its
actions, and `remote_launcher.py` runs on each machine.
"""
