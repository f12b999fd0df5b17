"""Program `python -m paceline`: the `paceline` command."""

import sys

from paceline.cli.main import main

sys.exit(main())
