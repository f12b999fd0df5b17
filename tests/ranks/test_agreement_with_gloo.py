"""Random inputs give what torch's gloo gives."""

from __future__ import annotations

import pytest
from collectives_vs_gloo import agree_with_gloo


@pytest.mark.parametrize(("size", "algorithm"), [(2, None), (3, None), (3, "halving_doubling")])
def test_every_collective_type_and_reduction_agrees_with_gloo(ranks, tmp_path, size, algorithm):
    assert min(ranks(size)(agree_with_gloo, str(tmp_path / "gloo"), algorithm)) > 60
