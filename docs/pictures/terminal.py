"""Draws terminal output as SVG, in the colors that the launcher uses."""

from __future__ import annotations

import re
from html import escape
from itertools import chain

_COLUMNS = 112
_CHARACTER, _LINE, _MARGIN, _TOP = 7.8, 18, 16, 38
_COLORS = {31: "#ff7b72", 32: "#7ee787", 33: "#e3b341", 34: "#79c0ff", 35: "#d2a8ff", 36: "#76e3ea"}
_TEXT, _BACKGROUND, _OWN, _PROMPT = "#d0d7de", "#0d1117", "#ffffff", "#8b949e"
_SGR = re.compile(r"\x1b\[(\d*)m")

Span = tuple[str, str]  # color, text


def render(text: str, title: str) -> str:
    """Returns the SVG document."""
    lines = list(chain.from_iterable(map(_wrapped, map(_spans, text.rstrip("\n").split("\n")))))
    width = int(_COLUMNS * _CHARACTER + 2 * _MARGIN)
    height = _TOP + len(lines) * _LINE + _MARGIN
    dots = "".join(
        f'<circle cx="{20 + 18 * n}" cy="18" r="6" fill="{color}"/>'
        for n, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    rows = "\n".join(
        f'<text x="{_MARGIN}" y="{_TOP + (row + 1) * _LINE - 4}" xml:space="preserve">'
        + "".join(f'<tspan fill="{color}">{escape(part)}</tspan>' for color, part in line)
        + "</text>"
        for row, line in enumerate(lines)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" \
viewBox="0 0 {width} {height}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">
<title>{escape(title)}</title>
<rect width="{width}" height="{height}" rx="8" fill="{_BACKGROUND}"/>
{dots}
{rows}
</svg>
"""


def _spans(line: str) -> list[Span]:
    own = _OWN if line.startswith("paceline: ") else _PROMPT if line.startswith("$ ") else _TEXT
    color, spans, at = own, [], 0
    for code in _SGR.finditer(line):
        spans.append((color, line[at : code.start()]))
        color = _COLORS.get(int(code[1] or 0), own)
        at = code.end()
    return [span for span in [*spans, (color, line[at:])] if span[1]]


def _wrapped(spans: list[Span]) -> list[list[Span]]:
    lines: list[list[Span]] = [[]]
    room = _COLUMNS
    for color, text in spans:
        while text:
            part, text = text[:room], text[room:]
            lines[-1].append((color, part))
            room -= len(part)
            if room == 0 and text:
                lines.append([])
                room = _COLUMNS
    return lines
