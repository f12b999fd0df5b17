"""Uses a share of a core until it is killed: python bench/elastic_cases/busy.py SHARE."""

from __future__ import annotations

import sys
import time

_PAUSE_S = 0.001
_LONGEST_S = 0.1  # a longer interval means that the process was stopped


def main() -> None:
    share, ran_s, before_s = float(sys.argv[1]), 0.0, time.monotonic()
    while True:
        now_s = time.monotonic()
        ran_s += min(now_s - before_s, _LONGEST_S)
        before_s = now_s
        if time.process_time() >= share * ran_s:
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
