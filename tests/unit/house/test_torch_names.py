"""Names shared with torch.distributed: errors, backends, option objects."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch.distributed as torch_dist

import paceline
from paceline import errors


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (errors.PacelineError, torch_dist.DistError),
        (errors.AuthenticationError, torch_dist.DistNetworkError),
        (errors.RendezvousTimeoutError, torch_dist.DistStoreError),
        (errors.StoreTimeoutError, torch_dist.DistStoreError),
        (errors.StoreConnectionError, torch_dist.DistNetworkError),
        (errors.CollectiveTimeoutError, torch_dist.DistBackendError),
        (errors.CollectiveMismatchError, torch_dist.DistBackendError),
    ],
)
def test_errors_are_torchs_as_well(ours, theirs):
    with pytest.raises(theirs, match="why") as caught:
        raise ours("why")
    assert type(caught.value) is ours and isinstance(caught.value, RuntimeError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("TimeoutError")])
def test_every_time_out_says_timed_out(name):
    error = getattr(errors, name)
    assert str(error("rank 1 did not reach the call")) == "timed out: rank 1 did not reach the call"
    assert str(error("it timed out")) == "it timed out"
    assert isinstance(error(""), TimeoutError)


def test_errors_come_without_torch_and_join_it_later():
    code = (
        "import sys; from paceline import errors; early = errors.StoreError('early');"
        "assert 'torch' not in sys.modules;"
        "import torch.distributed as dist; late = errors.StoreError('late');"
        "assert isinstance(late, dist.DistStoreError) and isinstance(early, dist.DistStoreError)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_empty_queue_is_torchs_error_too():
    with pytest.raises(paceline.StoreQueueEmptyError, match="the queue 'q' of .* is empty") as caught:
        paceline.HashStore().queue_pop("q", block=False)
    if hasattr(torch_dist, "QueueEmptyError"):
        assert isinstance(caught.value, torch_dist.QueueEmptyError)


def test_backends_are_named_as_in_torch():
    assert paceline.Backend("GLOO") == paceline.Backend.GLOO == "gloo"
    assert paceline.is_backend_available("paceline") and not paceline.is_backend_available("ucc")
    assert paceline.get_default_backend_for_device("cpu") == "paceline"
    with pytest.raises(ValueError, match="no backend supports tensors on meta; backends exist for cpu, cuda"):
        paceline.get_default_backend_for_device("meta")
    with pytest.raises(ValueError, match="Backend takes the name of a backend, not 3"):
        paceline.Backend(3)
    assert paceline.DistBackendError is torch_dist.DistBackendError


def test_options_of_torchs_backends_are_refused():
    with pytest.raises(ValueError, match="init_process_group: pg_options is for engines that have options"):
        paceline.init_process_group(store=paceline.HashStore(), rank=0, world_size=1, pg_options=object())
