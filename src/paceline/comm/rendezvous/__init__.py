"""Rendezvous of ranks by env://, tcp://, file:// or an explicit store: rank, world size and shared store.

May use: `store`, `security`, `errors`, `durations`. Start reading at `rendezvous.py`, then `check_in.py`, which has the
protocol by which ranks check in. `schedulers.py` reads the variables of schedulers.
"""
