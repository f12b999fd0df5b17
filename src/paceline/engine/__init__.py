"""Engines move and reduce tensors for a group; `paceline` (shared memory) is the native one.

May use: `rendezvous`, `store`, `security`, `_core`. Start reading at `api.py`; `failures.py` writes the errors.
"""
