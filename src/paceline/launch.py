"""Program `python -m paceline.launch`: the older form, for scripts that take their local rank as an argument."""

from __future__ import annotations

import sys

from paceline.operate.launch.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
