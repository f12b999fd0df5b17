"""One TCP port for all services on a machine: rendezvous, stores, links, state transfers and checkpoint copies.

A *multiplexer* listens on the port. Each service requests a *number* from the multiplexer instead of opening its own
port, and each connection begins with the number of its service. The multiplexer passes the connection's descriptor to
the process that holds the number, and does not forward any later bytes itself. That process authenticates the peer, as
on every connection.

May use: `security`, `linux`, `durations`. Start reading at `dialer.py`, which is used in place of `socket.connect`,
then `port_multiplexer.py`, whose `NumberedListener` is used in place of a listening socket.
"""
