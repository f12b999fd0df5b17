"""Replicas of checkpoints in the memory of launchers on several hosts. They survive the death of workers.

Each launcher has a `CheckpointCache`, which holds checkpoint files as memfds. A worker writes its part of a checkpoint
into the caches on its own host and on other hosts. Once all ranks have written their parts, all caches receive the
manifest. A worker that restores a checkpoint reads each file from any cache that has it, as if all caches formed one
disk.

May use: `checkpoint.format`, `store`, `one_port`, `security`, `elastic.failpoints` and `elastic.process_priority`; not
torch, because launchers import this package. Start reading at `cache.py`, which manages the memory. `server.py` is the
launcher's end of a connection, and `client.py` is the worker's end. `checkpoint/replicate.py` defines the steps of a
replication.
"""
