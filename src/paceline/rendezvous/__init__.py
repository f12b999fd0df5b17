"""From nothing to "rank r of n, and a store": env://, tcp://, file:// and an explicit store.

May use: `store`, `security`. Start reading at `join.py`, the protocol by which ranks check in.
"""
