"""The cost of a message on this network, which is measured when ranks of several hosts meet, or set by the user."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import astuple

import torch

from paceline import _core
from paceline.engine.algorithms import UNMEASURED
from paceline.engine.api import KnownCosts
from paceline.engine.channel import Message, Messages, Pieces
from paceline.engine.codes import DTYPE_CODES
from paceline.engine.formation import Formation
from paceline.engine.native.bootstrap import Topology
from paceline.engine.native.uneven import NETWORK_VARIABLE, read_network
from paceline.errors import RendezvousError, RendezvousTimeoutError
from paceline.schedule.cost import CostModel, LinkCost
from paceline.schedule.network import Network

VARIABLE = "PACELINE_COSTS"

_KEY = "engine/costs"
_NETWORK_KEY = "engine/network"
_BUDGET_S = 0.02  # for each of the two kinds of link: within a host and between hosts
_BULK = 512 << 10
_REDUCED = 1 << 20
_TIMEOUT_NS = 60_000_000_000
_LOOK_NS = 200_000_000  # a rank that waits for a message looks this often whether another has given up
_ALONE = 1  # as a number of bytes: no message follows the number


def agree_on_costs(
    formation: Formation, topology: Topology, links: Messages, known: KnownCosts, timeout_s: float
) -> tuple[CostModel, Network | None]:
    """Returns the same model on all ranks: PACELINE_COSTS as set on rank 0, or else what rank 0 knows or measures.

    What was measured is added to `known`, on all ranks, so that the next group of these hosts forms sooner.

    With it comes the network, if PACELINE_NETWORK on rank 0 says that it is uneven; see `uneven.py`.

    PACELINE_COSTS is JSON: {"within_host": [alpha, beta], "between_hosts": [alpha, beta], "gamma": gamma}, with alpha
    in seconds a message, beta and gamma in seconds a byte.

    Raises:
        ValueError: PACELINE_COSTS or PACELINE_NETWORK does not have its form.
        RendezvousError: a rank gave up or died.
        RendezvousTimeoutError: rank 0 did not publish the costs in time.
    """
    deadline = time.monotonic() + timeout_s
    partners = [topology.hosts[0][1]] if len(topology.hosts[0]) > 1 else []
    between = topology.hosts[1][0]
    measured = _measured_ranks(topology)
    if topology.rank == 0:
        given = os.environ.get(VARIABLE)
        probes = [_Probe(formation, topology, links, peer) for peer in (*partners, between)]
        model = _parse(given) if given else known.get(measured)
        if model is None:
            *within_host, between_hosts = map(_measure, probes)
            gamma = _core.time_reduction(_REDUCED) / _REDUCED
            within = within_host[0] if within_host else UNMEASURED.within_host
            model = known[measured] = CostModel(within, between_hosts, gamma)
        for probe in probes:
            probe.end()
        described = os.environ.get(NETWORK_VARIABLE, "")
        network = read_network(described, model, topology.hosts)
        formation.store.set(_KEY, _format(model))
        formation.store.set(_NETWORK_KEY, described)
        return model, network
    if topology.rank in (*partners, between):
        _answer(_Probe(formation, topology, links, 0))
    if formation.absent([_KEY, _NETWORK_KEY], deadline):
        raise RendezvousTimeoutError(
            f"{topology.members[topology.rank]}: {topology.members[0]} did not measure what messages cost within "
            f"{timeout_s:.0f} s; look at its output"
        )
    model = known[measured] = _parse(formation.store.get(_KEY).decode())
    return model, read_network(formation.store.get(_NETWORK_KEY).decode(), model, topology.hosts)


def _measured_ranks(topology: Topology) -> tuple[str, ...]:
    """Returns a text for each of the hosts whose ranks the model is measured with: its name and how many they are."""
    return tuple(f"{topology.members[ranks[0]].host} {min(len(ranks), 2)}" for ranks in topology.hosts[:2])


class _Probe:
    """Exchanges messages with one rank."""

    def __init__(self, formation: Formation, topology: Topology, links: Messages, peer: int) -> None:
        self._formation = formation
        self._topology = topology
        self._links = links
        self._peer = peer

    def send(self, tensor: torch.Tensor) -> None:
        """Sends `tensor` and waits until the send is over."""
        self._pass(self._links.send, tensor)

    def receive(self, tensor: torch.Tensor) -> None:
        """Receives into `tensor` and waits until the receive is over."""
        self._pass(self._links.receive, tensor)

    def end(self) -> None:
        """Tells the rank that nothing is measured any more."""
        self.send(torch.tensor([0], device="cpu"))

    def _pass(self, call: Callable[[int, int, int, Pieces, int, bool], Message], tensor: torch.Tensor) -> None:
        pieces = [tensor.data_ptr(), tensor.nbytes]
        message = call(self._peer, 0, DTYPE_CODES[tensor.dtype], pieces, _TIMEOUT_NS, False)
        while not message.wait(_LOOK_NS):
            self._formation.look()
        if message.outcome() is not None:
            self._formation.await_news()
            raise RendezvousError(
                f"{self._topology.members[self._topology.rank]}: {self._topology.members[self._peer]} died, left or "
                "stopped while the speed of the connection to it was measured; look at its output"
            )


def _measure(probe: _Probe) -> LinkCost:
    """Measures round trips within the time budget.

    Each round trip begins with a number that says how many bytes follow it, and the answer is empty. The number 0 (see
    `_Probe.end`) ends the measurement.
    """
    started = time.monotonic()

    def best_of(nbytes: int, most: int) -> float:
        best = float("inf")
        for _ in range(most):
            before = time.monotonic()
            probe.send(torch.tensor([nbytes], device="cpu"))
            if nbytes > _ALONE:
                probe.send(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))
            probe.receive(torch.empty(0, dtype=torch.uint8, device="cpu"))
            best = min(best, time.monotonic() - before)
            if time.monotonic() - started > _BUDGET_S:
                break
        return best

    alpha_s = best_of(_ALONE, 10) / 2
    beta_s = UNMEASURED.between_hosts.beta_s_per_byte
    if alpha_s < _BUDGET_S / 8:
        # A large message is offered before it is sent, so it takes two round trips.
        beta_s = max(1e-12, (best_of(_BULK, 3) - 4 * alpha_s) / _BULK)
    return LinkCost(alpha_s, beta_s)


def _answer(probe: _Probe) -> None:
    """Answers the messages of `_measure`, on the other rank."""
    nbytes = torch.empty(1, dtype=torch.int64, device="cpu")
    while True:
        probe.receive(nbytes)
        if int(nbytes) == 0:
            return
        if int(nbytes) > _ALONE:
            probe.receive(torch.empty(int(nbytes), dtype=torch.uint8, device="cpu"))
        probe.send(torch.empty(0, dtype=torch.uint8, device="cpu"))


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
