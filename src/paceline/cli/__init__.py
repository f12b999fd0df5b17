"""The `paceline` command: its subcommands, and the doctor in `doctor/`.

May use: every package below; a subcommand imports what it needs when it runs. Start reading at `main.py`.
"""
