"""From nothing to "rank r of n, and a store": env://, tcp://, file:// and an explicit store.

May use: `store`, `security`. Start reading at `check_in.py`, the protocol by which ranks meet.
"""
