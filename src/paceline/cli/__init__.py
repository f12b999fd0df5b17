"""The `paceline` command: its subcommands, with `doctor/` and `top/` in folders of their own.

May use: every package below. A subcommand imports its dependencies, in particular torch, only when it runs. Start
reading at `main.py`.
"""
