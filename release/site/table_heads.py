"""Removes empty table headers from pages."""

from __future__ import annotations

import re

_EMPTY_HEAD = re.compile(r"<thead>\s*<tr>\s*(?:<th(?: [^>]*)?></th>\s*)+</tr>\s*</thead>\s*")


def without_empty_heads(html: str) -> str:
    """Returns a page without empty table headers, which Markdown requires but which would be shown as blank rows."""
    return _EMPTY_HEAD.sub("", html)
