"""What a message costs here: measured when the ranks of several hosts meet, or given."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import astuple
from datetime import timedelta

import torch

from paceline import _core
from paceline.engine.bootstrap import Topology
from paceline.engine.channel import Message, Messages, Pieces
from paceline.engine.codes import DTYPE_CODES
from paceline.errors import RendezvousError
from paceline.schedule.cost import CostModel, LinkCost
from paceline.store.base import Store

VARIABLE = "PACELINE_COSTS"

_KEY = "engine/costs"
_BUDGET_S = 0.02  # for each of the two kinds of link
_BULK = 512 << 10
_REDUCED = 1 << 20
_TIMEOUT_NS = 60_000_000_000
_ALONE = 1  # nothing follows the number
# Where nothing can be measured: shared memory, and a fast Ethernet.
_WITHIN_HOST = LinkCost(2e-6, 1e-10)
_BETWEEN_HOSTS = LinkCost(3e-5, 5e-10)
UNMEASURED = CostModel(_WITHIN_HOST, _BETWEEN_HOSTS, 1e-10)


def agree_on_costs(store: Store, topology: Topology, links: Messages, timeout_s: float) -> CostModel:
    """The same model on all ranks: rank 0's measurements, or what PACELINE_COSTS says there.

    PACELINE_COSTS is JSON: {"within_host": [alpha, beta], "between_hosts": [alpha, beta], "gamma": gamma}, with alpha
    in seconds a message, beta and gamma in seconds a byte.

    Raises:
        ValueError: PACELINE_COSTS is not that.
    """
    partners = [topology.hosts[0][1]] if len(topology.hosts[0]) > 1 else []
    between = topology.hosts[1][0]
    if topology.rank == 0:
        given = os.environ.get(VARIABLE)
        within_host = _measure(links, partners[0]) if partners else _WITHIN_HOST
        between_hosts = _measure(links, between)
        gamma = _core.time_reduction(_REDUCED) / _REDUCED
        model = _parse(given) if given else CostModel(within_host, between_hosts, gamma)
        store.set(_KEY, _format(model))
        return model
    if topology.rank in (*partners, between):
        _answer(links)
    store.wait([_KEY], timedelta(seconds=timeout_s))
    return _parse(store.get(_KEY).decode())


def _measure(links: Messages, peer: int) -> LinkCost:
    """Round trips within the budget. A number says how many bytes follow it; the answer is empty, and 0 is the end."""
    started = time.monotonic()

    def best_of(nbytes: int, most: int) -> float:
        best = float("inf")
        for _ in range(most):
            before = time.monotonic()
            _pass(links.send, peer, torch.tensor([nbytes], device="cpu"))
            if nbytes > _ALONE:
                _pass(links.send, peer, torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))
            _pass(links.receive, peer, torch.empty(0, dtype=torch.uint8, device="cpu"))
            best = min(best, time.monotonic() - before)
            if time.monotonic() - started > _BUDGET_S:
                break
        return best

    alpha_s = best_of(_ALONE, 10) / 2
    beta_s = _BETWEEN_HOSTS.beta_s_per_byte
    if alpha_s < _BUDGET_S / 8:
        # A large message asks before it comes, so it takes two round trips.
        beta_s = max(1e-12, (best_of(_BULK, 3) - 4 * alpha_s) / _BULK)
    _pass(links.send, peer, torch.tensor([0], device="cpu"))
    return LinkCost(alpha_s, beta_s)


def _answer(links: Messages) -> None:
    """The other end of `_measure`."""
    nbytes = torch.empty(1, dtype=torch.int64, device="cpu")
    while True:
        _pass(links.receive, 0, nbytes)
        if int(nbytes) == 0:
            return
        if int(nbytes) > _ALONE:
            _pass(links.receive, 0, torch.empty(int(nbytes), dtype=torch.uint8, device="cpu"))
        _pass(links.send, 0, torch.empty(0, dtype=torch.uint8, device="cpu"))


def _pass(call: Callable[[int, int, int, Pieces, int, bool], Message], peer: int, tensor: torch.Tensor) -> None:
    pieces = [tensor.data_ptr(), tensor.nbytes]
    message = call(peer, 0, DTYPE_CODES[tensor.dtype], pieces, _TIMEOUT_NS, False)
    message.wait(_TIMEOUT_NS)
    if message.outcome() is not None:
        raise RendezvousError(f"the connection to rank {peer} broke while its speed was measured; look at its output")


def _parse(text: str) -> CostModel:
    try:
        data = json.loads(text)
        return CostModel(LinkCost(*data["within_host"]), LinkCost(*data["between_hosts"]), float(data["gamma"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{VARIABLE} is {text!r}; it must be JSON like "
            '{"within_host": [2e-6, 1e-10], "between_hosts": [3e-5, 5e-10], "gamma": 1e-10}'
        ) from error


def _format(model: CostModel) -> str:
    return json.dumps(
        {
            "within_host": astuple(model.within_host),
            "between_hosts": astuple(model.between_hosts),
            "gamma": model.gamma_s_per_byte,
        }
    )
