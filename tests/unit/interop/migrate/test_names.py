"""Names in other libraries and their counterparts in Paceline."""

from __future__ import annotations

import torch.distributed as torch_dist

import paceline.horovod
from paceline.interop.migrate.names import HOROVODS_NAMES, MigrationMode, new_name


def test_the_names_of_horovod_are_those_that_are_there():
    assert sorted(HOROVODS_NAMES) == sorted(paceline.horovod.__all__)
    assert all(hasattr(paceline.horovod, name) for name in HOROVODS_NAMES)


def test_every_public_name_of_torch_is_ours_or_keeps_torch():
    here = {
        name
        for name in torch_dist.distributed_c10d.__all__
        if new_name(f"torch.distributed.{name}", MigrationMode.IMPORT) is not None
    }
    assert {"all_reduce", "init_process_group", "P2POp", "ReduceOp", "new_group"} <= here
    assert all(hasattr(paceline, name) for name in here)
