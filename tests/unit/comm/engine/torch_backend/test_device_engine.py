"""Identifiers of GPUs, by which ranks that share a GPU are detected."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.comm.engine.torch_backend.device_engine import identify

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("hip", "properties", "identifier"),
    [
        (None, {"uuid": "4e45"}, "4e45"),
        (None, {}, ""),
        ("6.4", {"uuid": "5858"}, ""),  # "XX", the UUID of all GPUs that have none
    ],
)
def test_only_unique_identifiers_tell_that_ranks_share_a_gpu(monkeypatch, hip, properties, identifier):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    assert identify(GPU) == identifier
    assert identify(torch.device("cpu")) == ""
