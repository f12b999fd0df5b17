"""The parts of bench/verdicts.py: the faulty program, the faults, and the jobs that run it."""
