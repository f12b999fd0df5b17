"""One TCP port for all services of a machine: the rendezvous, stores, links between ranks, transfers and copies.

A *multiplexer* listens at the port. Each service requests a *number* from it instead of a port of its own, and each
connection begins with the number of the service that it is for. The multiplexer passes the connection itself to the
process that holds the number, so no byte passes through the multiplexer afterwards. That process authenticates the
peer, as on every connection.

May use: `security`, `linux`, `durations`, `routes`. Start reading at `dialer.py`, which is used in place of connecting
a socket, then `port_multiplexer.py`, whose `NumberedListener` is used in place of a listening socket.
"""
