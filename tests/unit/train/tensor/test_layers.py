"""Division of a layer's weights among ranks."""

from __future__ import annotations

import pytest

from paceline.train.tensor.layers import bounds


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("parts", [1, 2, 4, 9])
def test_parts_cover_the_length_once_and_are_even(length, parts):
    limits = [bounds(length, parts, part) for part in range(parts)]
    assert [index for start, stop in limits for index in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in limits]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
