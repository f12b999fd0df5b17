"""`paceline doctor`: finds what will cause trouble on this machine, between two machines, or in a script.

May use: `launch`, `store`, `security`. Start reading at `report.py`; each check is a function that returns findings.
"""
