"""Key-value stores that ranks share: TCP, Unix socket, file, in-process, and a prefixed view of another.

May use: `one_port`, `security`, `errors`, `durations`, `descriptors`, and `paceline._core`, which holds the table of
keys and the server. Start reading at `base.py`, the interface that all of them implement.
"""
