"""A worker joins while the others train: it gets a snapshot of the state, and the results since.

At the beginning of a batch *senders* among the members fork (`senders.py`, `snapshot.py`): the child has the state as it
is then, serves it in chunks (`serving.py`), and so are the results of the rounds that follow, which the sender logs
(`log.py`). The *receiver* takes chunks from all senders at once (`chunks.py`, `receiver.py`). Then it runs the script's
loop on the logged results (`replay.py`, `catching_up.py`) until it has caught up, and is admitted by a planned view. In
the usual loop it cannot; there the log has the steps of optimizers (`steps.py`), which the receiver makes again before
its loop begins (`following.py`, `course.py`). `wire.py` has what goes over the connections.

May use: security, store and group, and from elastic the registry, the agreement, the messages and the failpoints. Start
reading at `newcomer.py` for the receiver, and at `senders.py` for the others.
"""
