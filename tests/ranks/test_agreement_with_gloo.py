"""Random inputs give what torch's gloo gives."""

from __future__ import annotations

import pytest
from agreement import agree_with_gloo


@pytest.mark.parametrize("algorithm", [None, "halving_doubling"])
def test_every_collective_type_and_reduction_agrees_with_gloo(ranks, tmp_path, algorithm):
    assert min(ranks(3)(agree_with_gloo, str(tmp_path / "gloo"), algorithm)) > 60
