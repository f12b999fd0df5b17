"""In which order layers run, as far as it was seen."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Layer = TypeVar("Layer", bound=Hashable)


class Order(Generic[Layer]):
    """Predicts which layer follows another one: the one that did so last time.

    >>> order = Order()
    >>> [order.visit(layer) for layer in (0, 1, 2)]
    [None, None, None]
    >>> [order.visit(layer) for layer in (0, 1, 2)]
    [1, 2, None]
    """

    def __init__(self) -> None:
        self._after: dict[Layer, Layer] = {}
        self._visited: set[Layer] = set()
        self._latest: Layer | None = None

    def visit(self, layer: Layer) -> Layer | None:
        """Tells that a layer runs; a pass ends where one runs again.

        Returns:
            The layer that is likely to run next.
        """
        if layer in self._visited:
            self._visited.clear()
            self._latest = None
        if self._latest is not None:
            self._after[self._latest] = layer
        self._visited.add(layer)
        self._latest = layer
        return self._after.get(layer)
