"""Job report: one HTML file with the page's scripts and styles and the job's data."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from importlib.resources import files
from pathlib import PurePosixPath

from paceline.operate.dashboard.dashboard_state import DashboardState
from paceline.operate.dashboard.event_stream import Feed

STATIC = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

MODULES = (
    "format.js",
    "dom.js",
    "state.js",
    "header.js",
    "ranks.js",
    "step.js",
    "heat.js",
    "timeline.js",
    "curves.js",
    "lists.js",
    "view.js",
)
"""The scripts shared by the page and the report, ordered so that each follows the scripts that it imports."""

_IMPORT = re.compile(r"^import .*\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_HEAD = re.compile(r'<link rel="(?:icon|stylesheet)".*?>\n|<script .*?</script>\n')


def assets() -> dict[str, bytes]:
    """Returns the files of the page, keyed by name."""
    folder = files("paceline.operate.dashboard") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if PurePosixPath(file.name).suffix in STATIC}


def report(state: DashboardState, made: str) -> bytes:
    """Returns the report as self-contained HTML, which loads no other files.

    Args:
        state: the state of the job.
        made: the text of the footer, which states the time and the program.
    """
    known = {name: data.decode() for name, data in assets().items()}
    styles = known["uplot.css"] + known["page.css"]
    chart = known["uplot.js"]
    program = "".join(_without_modules(known[name]) for name in (*MODULES, "report.js"))
    policy = (
        f"default-src 'none'; style-src {_hash(styles)}; script-src {_hash(chart)} {_hash(program)}; base-uri 'none'; "
        "form-action 'none'"
    )
    feed = Feed("report")
    feed.publish(state)
    data = feed.snapshot().data.decode().replace("<", "\\u003c")  # text from the job must not close the script element
    head = (
        f'<meta http-equiv="content-security-policy" content="{policy}">\n<style>{styles}</style>\n'
        f"<script>{chart}</script>\n"
    )
    tail = (
        f'<footer class="quiet">{escape(made)}</footer>\n<script type="application/json" id="picture">{data}</script>\n'
        f'<script type="module">{program}</script>\n</body>'
    )
    page = _HEAD.sub("", known["index.html"]).replace("<html ", '<html data-report="1" ', 1)
    return page.replace("</head>", head + "</head>", 1).replace("</body>", tail, 1).encode()


def _without_modules(text: str) -> str:
    """Removes imports and exports from a module's code, so that all modules can be combined into one script."""
    return _EXPORT.sub("", _IMPORT.sub("", text))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
