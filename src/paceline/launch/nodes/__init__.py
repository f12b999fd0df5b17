"""How the launchers of several machines act as one: who is there, who runs in which generation, what to do next.

One launcher serves the meeting; every launcher, that one too, is a node of it and keeps a connection. May use:
`launch`, `store`, `security`. Start reading at `membership.py`, which decides everything without a socket or a clock;
`server.py` and `link.py` carry its orders.
"""
