"""The job's secret: where it comes from, the keys derived from it, and how connections prove that they hold it.

May use: `errors`, `descriptors`, and `paceline._core`, which encrypts. Start reading at `secret.py`, then
`handshake.py`; `doorkeeper.py` accepts connections. `levels.py` says which ones are encrypted, `encryption.py` does it.
"""
