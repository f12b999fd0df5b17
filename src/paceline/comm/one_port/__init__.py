"""One TCP port for all that a machine offers to others: the meeting, stores, links between ranks, transfers, copies.

A *gate* listens at the port. What else would listen at a port of its own asks the gate for a *number* instead, and
connections say first which number they want; the gate then hands the connection itself to the process that holds the
number, so that no byte passes through the gate afterwards. Who connects is checked there, as on every connection.

May use: `security`, `descriptors`, `errors`. Start reading at `choice.py`, which says whether a job has such a port,
then `gate.py`; `listener.py` is used in place of a listening socket, and `dialing.py` in place of connecting one.
"""
