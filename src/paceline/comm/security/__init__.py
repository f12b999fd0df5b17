"""Protection of connections: the job's secret, the authentication handshake, TLS, and limits on unauthenticated peers.

May use: `errors`, `linux`, and `paceline._core`, which implements the encryption. Start reading at `secret.py`, then
`handshake.py`. `authenticated_listener.py` accepts connections. The level in `secret.py` determines which connections
are encrypted.
"""
