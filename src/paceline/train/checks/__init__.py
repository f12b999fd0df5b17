"""Checks that detect silent training failures: non-finite gradients and differing replicas.

May use: `comm` and below, and the modules directly in `train`. Start reading at `module_checks.py`, which module
wrappers call before and after averaging gradients. `finite_check.py` examines the gradients, and `replica_check.py`
compares the replicas.
"""
