"""Replicas of checkpoints in the memory of launchers, on the workers' own host and on others; they outlive the workers.

Each launcher has a `CheckpointCache`, which holds files of checkpoints as memfds. A worker writes its part of a
checkpoint into the cache of its own host and into those of other hosts; once all ranks have done so, all caches receive
the manifest. A worker that restores a checkpoint reads each file from any cache that has it, as if all caches were one
disk.

May use: `checkpoint.format`, `checkpoint.rank_results`, `store`, `one_port`, `security`, `elastic.failpoints` and
`elastic.process_priority`; never torch, since launchers import this package. Start reading at `cache.py`, the memory,
and `replicate.py`, the order of replication; `server.py` is the launcher's side of a connection, and `client.py` is the
worker's.
"""
