"""Engines that the security level permits between hosts."""

from __future__ import annotations

import pytest

from paceline.comm.engine.api import BackendChoice
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.group import engines as of_groups
from paceline.comm.group.engines import permitted, require_permitted


def test_other_engines_do_not_connect_hosts_at_encrypt(monkeypatch):
    monkeypatch.setenv("PACELINE_SECURITY", "encrypt")
    members = [RankIdentity(0, "here", 1), RankIdentity(1, "there", 2)]
    require_permitted("gloo", 0, members[:1])
    with pytest.raises(ValueError, match="rank 0.*'gloo' sends tensors between the hosts here, there.*'paceline'"):
        require_permitted("gloo", 0, members)


def test_nccl_is_refused_at_once_where_it_must_encrypt(monkeypatch):
    members = [RankIdentity(0, "here", 1), RankIdentity(1, "there", 2)]
    engines = {"cpu": "paceline", "cuda": "nccl"}
    named, default = BackendChoice("nccl", engines), BackendChoice("cpu:paceline,cuda:nccl", engines, is_default=True)
    for level, port, message in (
        ("encrypt", None, "'nccl' sends tensors between the hosts here, there"),
        ("auth", 7000, "use port 7000 only, and the engine 'nccl'"),
    ):
        monkeypatch.setattr(of_groups, "chosen_level", lambda level=level: level)
        monkeypatch.setattr(of_groups, "chosen_port", lambda port=port: port)
        with pytest.raises(ValueError, match=message):
            permitted(named, 0, members)
        assert permitted(named, 0, members[:1]) is named
        chosen = permitted(default, 0, members)
        assert (chosen.text, chosen.engines) == ("paceline", {"cpu": "paceline"}), "others pass through host memory"
    monkeypatch.setattr(of_groups, "chosen_port", lambda: None)
    assert permitted(default, 0, members) is default
