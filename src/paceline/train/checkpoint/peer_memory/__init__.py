"""Copies of checkpoints in the memory of launchers, which outlives the workers: on their own host and on peers' hosts.

Each launcher has a *vault*, in which files of checkpoints are memfds. A worker writes its part of a checkpoint into the
vault of its own host and into those of its peers; once all ranks have done so, all vaults are given the manifest. A
worker that restores reads the files from whichever vault has them, as if those were one disk.

May use: `checkpoint.format`, `store`, `one_port`, `security`, `elastic.failpoints` and `elastic.joining.priority`;
never torch, since launchers import it. Start reading at `vault.py`, what is held, and `sending.py`, the order in which
a copy becomes one; `service.py` is the launcher's side of a connection, `client.py` the worker's.
"""
