"""The fixture that destroys default process groups before the next test."""

from __future__ import annotations

import pytest
import torch.distributed as torch_dist
from unit.conftest import destroy_default_groups

import paceline


@pytest.mark.parametrize("module", [paceline, torch_dist], ids=["paceline", "torch.distributed"])
def test_a_default_group_that_a_test_left_is_destroyed_and_named(module):
    more = {} if module is paceline else {"backend": "gloo"}
    module.init_process_group(store=module.HashStore(), rank=0, world_size=1, **more)
    assert destroy_default_groups() == [module.__name__]
    assert not paceline.is_initialized() and not torch_dist.is_initialized()
    assert destroy_default_groups() == []
