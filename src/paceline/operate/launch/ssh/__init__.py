"""Starts the launchers of several machines from one of them, by ssh, and ends them: `paceline run --hosts a:4,b:4`.

May use: the rest of `launch`. Start reading at `conduct.py`, which decides what happens when; `starter.py` does it, and
`far_end.py` runs on each machine. `hosts.py` reads who takes part, and `refusals.py` says why a machine did not come.
"""
