"""Engines move and reduce tensors for a group; `paceline` (shared memory) is the native one.

May use: `rendezvous`, `store`, `security`, `_core`. Start reading at `native.py`; `failures.py` writes the errors.
"""
