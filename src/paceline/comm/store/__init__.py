"""Key-value stores that ranks share: TCP, Unix socket, file, in-process, and a prefixed view of another.

May use: `one_port`, `security`, `errors`, `durations`, `linux`, `routes`, and `paceline._core`, which has the table of
keys and the server. Start reading at `store.py`, which has the interface that all of them implement.
"""
