"""Shows the examples of docstrings as code; mkdocstrings loads this as an extension of griffe."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object
from reference import fenced


class Examples(Extension):
    """Has mkdocstrings read each docstring with fences."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Changes the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
