"""Proves that the schedules of a world are right.

May use: the rest of `schedule`. Schedules of `synthesis` are proved before they run, all others in tests only. Start
reading at `symbolic.py`.
"""
