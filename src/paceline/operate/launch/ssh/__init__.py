"""Starts a job's launchers on several machines by ssh: `paceline run --hosts a:4,b:4`.

May use: the rest of `launch`. Start reading at the state machine in `remote_launch.py`. `ssh_launcher.py` performs the
actions of the state machine, and `remote_launcher.py` runs on each machine.
"""
