"""Under torchrun, which serves MASTER_PORT itself, ranks perform the rendezvous on a different port."""

from __future__ import annotations

import os

import paceline as dist


def meet_beside_torchrun() -> int:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["TORCHELASTIC_RUN_ID"] = f"test-{os.environ['PACELINE_SECRET']}"
    dist.init_process_group()
    return dist.get_world_size()


def test_ranks_meet_under_torchrun_which_holds_the_port(ranks):
    assert ranks(2)(meet_beside_torchrun) == [2, 2]
