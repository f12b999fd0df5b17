"""Lets ranks meet by env://, tcp://, file:// or an explicit store, and learn their rank, world size and shared store.

May use: `store`, `security`, `errors`, `durations`. Start reading at `rendezvous.py`, then `check_in.py`, the protocol
by which ranks check in; `verdict.py` says what happens when one dies. `schedulers.py` reads what schedulers set.
"""
