"""What bench/verdicts.py is made of: the faulty program, the faults, and the jobs that run it."""
