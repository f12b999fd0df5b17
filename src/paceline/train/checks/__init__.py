"""Checks that detect silent failures of training: non-finite gradients and differing replicas.

May use: `comm` and below, and the modules directly in `train`. Start reading at `module_checks.py`; module wrappers
call it before and after each average. `finite_check.py` examines the gradients, and `replica_check.py` compares the
replicas.
"""
