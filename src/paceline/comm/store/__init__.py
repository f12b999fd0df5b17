"""Key-value stores that ranks share: over TCP, over a Unix socket, in a file, in-process, and as a prefixed view.

May use: `one_port`, `security`, `errors`, `durations`, `linux`, `routes`, and `paceline._core`, which has the table of
keys and the server. Start reading at `store.py`, which has the interface that all stores implement.
"""
