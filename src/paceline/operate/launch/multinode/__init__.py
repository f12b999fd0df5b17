"""Lets the launchers of several machines act as one: who is there, who runs in which generation, what to do next.

One launcher serves the meeting; every launcher, including that one, is a node of it and keeps a connection. May use:
the rest of `launch`, `store`, `security`. Start reading at `membership.py`, which decides everything without a socket
or a clock; `server.py` and `remote_client.py` carry its orders.
"""
