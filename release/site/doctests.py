"""Formats the examples in docstrings as code. mkdocstrings loads this module as an extension of griffe."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object
from reference import fenced


class Examples(Extension):
    """Adds fences to each docstring before mkdocstrings parses it."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Updates the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
