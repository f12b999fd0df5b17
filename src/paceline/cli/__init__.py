"""The `paceline` command line. Subcommands that need several files (`doctor`, `top`) have their own folders.

May use: every package below. A subcommand imports its dependencies, in particular torch, only when it runs. Start
reading at `main.py`.
"""
