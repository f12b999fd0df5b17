"""Coordination of launchers on several machines as one job: membership, generations, and orders to each machine.

Launchers exchange reports and orders through the *rendezvous*, which one of them hosts. Every launcher, including the
host, is a node and stays connected to the rendezvous. May use: the rest of `launch`, `store`, `security`, and the
protocol in `train/elastic`. Start reading at `membership.py`, which makes all decisions without using sockets or a
clock. `server.py` and `remote_client.py` deliver the resulting orders.
"""
