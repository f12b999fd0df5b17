"""The `paceline` command.

May use: everything below. Start reading at `main.py`.
"""
