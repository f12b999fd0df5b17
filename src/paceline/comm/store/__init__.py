"""Key-value stores shared by ranks: over TCP, over a Unix socket, in a file, in one process, and as a prefixed view.

May use: `one_port`, `security`, `errors`, `durations`, `linux`, `routes`, and `paceline._core`, which implements the
table of keys and the server. Start reading at `store.py`, which defines the interface of all stores.
"""
