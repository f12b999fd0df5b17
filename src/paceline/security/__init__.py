"""The job's secret: where it comes from, the keys derived from it, and how connections prove that they hold it.

May use: `errors`, `descriptors`. Start reading at `secret.py`, then `handshake.py`; `doorkeeper.py` accepts
connections.
"""
