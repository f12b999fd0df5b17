"""The program `python -m paceline`, and the entry point of the command `paceline`."""

from __future__ import annotations

import sys

from paceline.linux import die_on_interrupt


def main() -> int:
    """Runs the command line of this process; returns its exit code.

    Ctrl-C kills the process until the command installs its own handler for SIGINT. A launcher installs its handler
    before it starts other processes.
    """
    die_on_interrupt()
    from paceline.cli.main import main as run_command_line

    return run_command_line()


if __name__ == "__main__":
    sys.exit(main())
