"""Shows lines again and again: in place on a terminal, and once, or one after the other, where there is none."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

_HOME, _REST, _LINE = "\x1b[H", "\x1b[J", "\x1b[K"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_SIZE = (100, 30)

Draw = Callable[[int, int, bool], list[str]]  # (width, height, is coloured) -> lines


def show(draw: Draw, every_s: float, is_once: bool) -> None:
    """Shows what `draw` returns every so many seconds, until q or Ctrl-C is typed; once if that is asked for."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    width, height = shutil.get_terminal_size(_SIZE) if is_terminal else _SIZE
    if is_once or not is_terminal:
        is_coloured = is_terminal and "NO_COLOR" not in os.environ
        while True:
            print("\n".join(draw(width, 1000, is_coloured)), flush=True)
            if is_once:
                return
            time.sleep(every_s)
            print()
    with contextlib.suppress(KeyboardInterrupt), _full_screen():
        while True:
            width, height = shutil.get_terminal_size(_SIZE)
            shown = draw(width, height - 1, "NO_COLOR" not in os.environ)
            hint = f"{_LINE}\x1b[{height};1H\x1b[90mq ends this view, not the job\x1b[0m"
            sys.stdout.write(_HOME + "".join(f"{line}{_LINE}\r\n" for line in shown) + _REST + hint)
            sys.stdout.flush()
            if _is_typed("qQ\x1b", every_s):
                return


@contextlib.contextmanager
def _full_screen() -> Iterator[None]:
    """Uses the terminal's other screen, without a cursor, and gives it back as it was."""
    before = termios.tcgetattr(0) if sys.stdin.isatty() else None
    sys.stdout.write(_ENTER)
    try:
        if before is not None:
            tty.setcbreak(0)
        yield
    finally:
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _is_typed(keys: str, within_s: float) -> bool:
    if not sys.stdin.isatty():
        time.sleep(within_s)
        return False
    ready = select.select([0], [], [], within_s)[0]
    return bool(ready) and any(key in keys for key in os.read(0, 64).decode(errors="replace"))
