"""Key-value stores that ranks share: TCP, Unix socket, file, in-process, and a prefixed view of another.

May use: `security`, `_core`. Start reading at `base.py`, the interface all of them keep.
"""
