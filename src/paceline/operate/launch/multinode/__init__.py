"""The launchers of several machines as one job: membership, generations, and orders to each machine.

One launcher serves the meeting; every launcher, including that one, is a node and keeps a connection to it. May use:
the rest of `launch`, `store`, `security`, and the protocol of `train/elastic`. Start reading at `membership.py`, which
makes all decisions without a socket or a clock; `server.py` and `remote_client.py` deliver its orders.
"""
