"""Shows the examples of docstrings as code. MkDocs would read their lines as text, and a list of lists as a link."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLES = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


def fenced(docstring: str) -> str:
    """Returns the docstring with a fence around each run of examples."""
    return _EXAMPLES.sub(lambda found: f"```pycon\n{found[0]}\n```", docstring)


class Examples(Extension):
    """Has mkdocstrings read each docstring with fences."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Changes the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
