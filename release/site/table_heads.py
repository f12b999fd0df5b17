"""The tables of a page as the site shows them."""

from __future__ import annotations

import re

_EMPTY_HEAD = re.compile(r"<thead>\s*<tr>\s*(?:<th(?: [^>]*)?></th>\s*)+</tr>\s*</thead>\s*")


def without_empty_heads(html: str) -> str:
    """Returns a page without the empty heads of tables, which Markdown demands, and which would be blank rows."""
    return _EMPTY_HEAD.sub("", html)
