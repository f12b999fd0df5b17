"""The program `python -m paceline.launch`, for scripts that take the local rank as a command-line argument."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from paceline.linux import die_on_interrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a job like `paceline run`, but passes --local_rank=N to each worker unless --use-env is given."""
    die_on_interrupt()
    from paceline.operate.launch.command import add_run_arguments, run
    from paceline.operate.launch.flags import Parser

    parser = Parser(
        prog="python -m paceline.launch",
        description="As `paceline run`, but passes --local_rank=N to each worker, unless --use-env is given.",
    )
    parser.add_argument("--use-env", "--use_env", action="store_true", help="LOCAL_RANK in the environment is enough")
    add_run_arguments(parser, os.environ)
    options = parser.parse_args(arguments)
    if options.no_python and not options.use_env:
        parser.error("--no-python needs --use-env: programs do not receive --local_rank")
    options.passes_local_rank = not options.use_env
    options.words = sys.argv[1:] if arguments is None else list(arguments)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
