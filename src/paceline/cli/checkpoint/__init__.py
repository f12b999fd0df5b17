"""`paceline checkpoint`: shows, verifies, compares and exports checkpoints.

May use: `checkpoint`; what needs torch imports it when it runs. Start reading at `command.py`.
"""
