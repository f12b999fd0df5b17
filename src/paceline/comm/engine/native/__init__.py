"""Paceline's own engine: shared memory between the ranks of a host, TCP between hosts.

May use: the files of `engine` itself, `schedule`, `rendezvous`, `store`, `security`, `_core`. Start reading at
`engine.py`; `scheduled_channel.py` runs collectives between hosts, and `_core.HostGroup` those of one host.
`bootstrap.py` connects the ranks of a host, `connections.py` those of different hosts.
"""
