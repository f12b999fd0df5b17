"""`paceline doctor`: finds likely problems on this machine, between two machines, or in a script.

May use: `launch`, `store` and `security`. Start reading at `command.py`; each check is a function that returns
diagnostics.
"""
