"""The priority of workers that an agent starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.operate.launch.elastic.elastic_agent import ElasticAgent
from paceline.operate.launch.elastic.worker_pool import PoolWorker
from paceline.train.elastic import protocol
from paceline.train.elastic.protocol import TransferOffer, WaitNotice


@pytest.mark.parametrize("is_replacement", [True, False])
def test_a_replacement_yields_until_it_is_told_to_learn(is_replacement: bool) -> None:
    happened: list[object] = []
    agent = object.__new__(ElasticAgent)
    nothing = SimpleNamespace(write=lambda *_, **__: None, watch=lambda _: None, began=lambda _: None)
    agent._events = agent._cleanup = agent._exits = nothing
    agent._connection = SimpleNamespace(client=SimpleNamespace(send=lambda report: None))
    agent._priorities = SimpleNamespace(
        begin=lambda pid: happened.append(("yields", pid)), end=lambda pid: happened.append(("is back", pid))
    )
    channel = SimpleNamespace(send=lambda message: happened.append(type(protocol.decode_to_worker(message)).__name__))
    member = PoolWorker("0.1.1", 1, 1, channel, 0.0, is_replacement=is_replacement)
    member.worker = SimpleNamespace(pid=7)
    agent._members = SimpleNamespace(by_uid={"0.1.1": member}.get)
    agent._on_start(member)
    for message in (WaitNotice("a while"), TransferOffer(5, "0.0.0", 3, "x:1")):
        agent._send_to_worker("0.1.1", message)
    assert happened == [("yields", 7)] * is_replacement + ["WaitNotice", ("is back", 7), "TransferOffer"]
