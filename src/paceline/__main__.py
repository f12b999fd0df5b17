"""The program `python -m paceline` and the entry point of the `paceline` command."""

from __future__ import annotations

import sys

from paceline.linux import die_on_interrupt


def main() -> int:
    """Runs the command given on this process's command line; returns the exit code.

    Until the command installs its own handler for SIGINT, Ctrl-C kills the process. A launcher installs its handler
    before it starts other processes.
    """
    die_on_interrupt()
    from paceline.cli.main import main as run_command_line

    return run_command_line()


if __name__ == "__main__":
    sys.exit(main())
