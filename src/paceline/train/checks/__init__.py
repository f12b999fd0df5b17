"""Checks that detect failures of training that raise no error: non-finite gradients and differing replicas.

May use: `comm` and below, and the files of `train` itself. Start reading at `module_checks.py`, which a wrapper of a
module calls around each average: `finite_check.py` examines the gradients, and `replica_check.py` compares the
replicas.
"""
