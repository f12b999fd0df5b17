"""A worker joins while the others train: it gets a snapshot of the state, and the results since.

At the beginning of a batch *donors* among the members fork (`donors.py`, `snapshot.py`): the child has the state as it
is then, serves it in chunks (`serving.py`), and so are the results of the rounds that follow, which the donor logs
(`log.py`). The *learner* takes chunks from all donors at once (`chunks.py`, `learner.py`). Then it runs the script's
loop on the logged results (`replay.py`, `catching_up.py`) until it has caught up, and is admitted by a planned view. In
the usual loop it cannot; there the log has the steps of optimizers (`steps.py`), which the learner makes again before
its loop begins (`following.py`, `course.py`). `wire.py` has what goes over the connections.

May use: security, store and group, and from elastic the registry, the agreement, the messages and the failpoints. Start
reading at `newcomer.py` for the learner, and at `donors.py` for the others.
"""
