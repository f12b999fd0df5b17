"""The job's secret: where it comes from and the keys derived from it.

May use: `paceline._core` (the handshake itself is native/auth). Start reading at `secret.py`.
"""
