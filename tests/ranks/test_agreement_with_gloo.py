"""Results on random inputs equal those of torch's gloo."""

from __future__ import annotations

import pytest
import torch_groups
from collectives_vs_gloo import agree_with_gloo


@pytest.mark.parametrize(("size", "algorithm"), [(2, None), (3, None), (3, "halving_doubling")])
def test_every_collective_type_and_reduction_agrees_with_gloo(ranks, tmp_path, size, algorithm):
    assert min(ranks(size)(agree_with_gloo, str(tmp_path / "gloo"), algorithm)) > 60


def agree_over_its_groups(file: str, backend: str, rounds: int) -> int:
    if backend == "nccl":
        torch_groups.use()
    return agree_with_gloo(file, None, backend=backend, rounds=rounds)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_engines_over_process_groups_agree_with_torchs(ranks, tmp_path, backend):
    assert min(ranks(2)(agree_over_its_groups, str(tmp_path / "gloo"), backend, 1)) > 60


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_thousand_random_calls_agree_with_torch_distributed(ranks, tmp_path, backend):
    compared = ranks(3)(agree_over_its_groups, str(tmp_path / "gloo"), backend, 20, timeout_s=500)
    assert min(compared) >= 2000
