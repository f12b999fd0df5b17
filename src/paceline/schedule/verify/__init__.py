"""Proves that the schedules of a world are right, and simulates their time; nothing here runs in a collective.

May use: the rest of `schedule`; only tests import it. Start reading at `symbolic.py`; `simulate.py` has the clock.
"""
