"""State transfer to a joining worker while the others train: a snapshot, the later results, and their replay.

At the beginning of a batch, some members, the *senders*, fork (`sender.py`). The child process holds the state as of
that time and serves it in chunks, followed by the results of later rounds, which the sender logs
(`snapshot_server.py`). The *receiver* requests chunks from all senders concurrently (`receiver.py`). It then runs the
script's loop with the logged results in place of computed ones, until it has caught up and a planned view admits it
(`catch_up.py`). A DDP loop cannot use logged results. In that case, the log contains the optimizer steps
(`optimizer_steps.py`), which the receiver repeats before its loop begins. `transfer_protocol.py` defines the messages.

May use: security, one_port, store and group, and the state, agreement, messages and failpoints of `elastic`. Start
reading at `receiver.py`, then `sender.py`.
"""
