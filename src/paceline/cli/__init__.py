"""The `paceline` command: its subcommands, and the doctor in `doctor/`.

May use: every package below; a subcommand imports what it needs when it runs. Start reading at `main.py`.

`paceline checkpoint`: shows, verifies, compares and exports checkpoints.

May use: `checkpoint`; what needs torch imports it when it runs. Start reading at `command.py`.
"""

from __future__ import annotations
