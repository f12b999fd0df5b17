"""Paceline's own engine, which uses shared memory within a host and TCP between hosts.

May use: the files in `engine` itself, `schedule`, `rendezvous`, `store`, `security`, `_core`. Start reading at
`engine.py`, whose `ScheduledChannel` runs collectives between hosts; `_core.HostGroup` runs collectives within a host.
`bootstrap.py` connects ranks on the same host, and `connections.py` connects ranks on different hosts.
"""
