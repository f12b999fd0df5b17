"""Rendezvous of ranks by env://, tcp://, file:// or an explicit store; provides the rank, world size and shared store.

May use: `store`, `security`, `errors`, `durations`. Start reading at `rendezvous.py`, then `check_in.py`, which
implements the protocol by which ranks check in. `schedulers.py` reads the environment variables set by schedulers.
"""
