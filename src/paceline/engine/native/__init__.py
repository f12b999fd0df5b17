"""Paceline's own engine: shared memory between the ranks of a host, TCP between hosts.

May use: `engine/api.py`, `schedule`, `rendezvous`, `store`, `security`, `_core`. Start reading at `engine.py`.
"""
