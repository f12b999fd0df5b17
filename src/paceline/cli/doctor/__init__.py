"""`paceline doctor`: what on this machine, between two machines, or in a script will make trouble.

May use: `launch`, `security`. Start reading at `report.py`; each check is a function that gives findings.
"""
