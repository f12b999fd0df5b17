"""Link costs of the network, measured when a group that spans several hosts forms, or set by the user.

Within a time budget, rank 0 measures round trips to a rank on its own host and to a rank on another host. If there are
only a few hosts, the hosts' first ranks also measure the links between all pairs of hosts, to detect unequal links.
These measurements follow the rounds of a tournament (`comm/schedule/network.py`). Each pair is measured first in one
direction and then in the other. Links that appear to be unequal are measured again, and the shortest time is used,
because the links of a busy host also appear slow.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from itertools import combinations

import torch

from paceline import _core
from paceline.comm.engine.api import KnownCosts
from paceline.comm.engine.channel import DTYPE_CODES, Messages, PendingMessage, Pieces
from paceline.comm.engine.formation import Formation
from paceline.comm.engine.native.bootstrap import Topology
from paceline.comm.engine.network_settings import (
    COSTS_VARIABLE,
    NETWORK_VARIABLE,
    UNMEASURED,
    parse_costs,
    read_network,
)
from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.schedule.network import Network, NetworkLink, Pair, describe_differences, round_robin_rounds
from paceline.comm.schedule.synthesis import MOST_HOSTS, MOST_RANKS
from paceline.errors import RendezvousError, RendezvousTimeoutError

_SHORT_S, _LONG_S = 0.02, 0.1  # the time budgets for short and long messages
_FAR_S = 0.0025
_LONG, _BULK = 64 << 10, 512 << 10
_TRIES = 3
_TIMEOUT_NS = 60_000_000_000
_LOOK_NS = 200_000_000  # the interval between checks for ranks that gave up, while waiting for a message
_NO_DATA = 1  # announced in place of a size if no message follows
_PASS_KEY = "engine/pairs/pass"
_PASSES = 3
_COSTS_KEY, _NETWORK_KEY, _PAIRS_KEY = _KEYS = ["engine/costs", "engine/network", "engine/pairs"]
_REDUCED = 1 << 20


class Probe:
    """The messages exchanged in a measurement between this rank and another rank."""

    def __init__(self, formation: Formation, topology: Topology, links: Messages, peer: int) -> None:
        self._formation = formation
        self._topology = topology
        self._links = links
        self._peer = peer

    def send(self, tensor: torch.Tensor) -> None:
        """Sends `tensor` and waits for the send to complete."""
        self._pass(self._links.send, tensor)

    def receive(self, tensor: torch.Tensor) -> None:
        """Receives into `tensor` and waits for the receive to complete."""
        self._pass(self._links.receive, tensor)

    def end(self) -> None:
        """Ends the measurement on the other rank."""
        self.send(torch.tensor([0], device="cpu"))

    def _pass(self, call: Callable[[int, int, int, Pieces, int, bool], PendingMessage], tensor: torch.Tensor) -> None:
        pieces = [tensor.data_ptr(), tensor.nbytes]
        message = call(self._peer, 0, DTYPE_CODES[tensor.dtype], pieces, _TIMEOUT_NS, False)
        while not message.wait(_LOOK_NS):
            self._formation.look()
        if message.outcome() is not None:
            self._formation.await_progress()
            raise RendezvousError(
                f"{self._topology.members[self._topology.rank]}: {self._topology.members[self._peer]} died, left or "
                "stopped while the speed of the connection to it was measured; look at its output"
            )


def is_far(alpha_s: float) -> bool:
    """Returns True if a link's latency is too high to measure the link's bandwidth with long messages."""
    return alpha_s >= _FAR_S


def measure(probe: Probe) -> LinkCost:
    """Measures round trips within a time budget and uses the shortest one, because a rank may be temporarily busy.

    In each round trip, this rank sends the size of a message and then the message, and the other rank replies with an
    empty message. The size 0 (see `Probe.end`) ends the measurement. The first round trip is discarded, because the
    other rank may not have reached the measurement yet.
    """

    def best_of(nbytes: int, most: int, budget_s: float) -> float:
        best, deadline = float("inf"), time.monotonic() + budget_s
        for _ in range(most):
            before = time.monotonic()
            probe.send(torch.tensor([nbytes], device="cpu"))
            if nbytes > _NO_DATA:
                probe.send(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))
            probe.receive(torch.empty(0, dtype=torch.uint8, device="cpu"))
            best = min(best, time.monotonic() - before)
            if time.monotonic() > deadline:
                break
        return best

    best_of(_NO_DATA, 1, 0.0)
    alpha_s = best_of(_NO_DATA, 10, _SHORT_S) / 2
    if is_far(alpha_s):
        return LinkCost(alpha_s, UNMEASURED.between_hosts.beta_s_per_byte)
    # A rank sends a large message only after the other rank has accepted an offer, so the message takes two round
    # trips. On slow links, shorter messages are used.
    nbytes, took_s = _LONG, best_of(_LONG, _TRIES, _LONG_S)
    if took_s < _LONG_S / 4:
        nbytes, took_s = _BULK, best_of(_BULK, _TRIES, _LONG_S)
    return LinkCost(alpha_s, max(1e-12, (took_s - 4 * alpha_s) / nbytes))


def answer(probe: Probe) -> None:
    """Replies to the messages that the other rank sends in `measure`."""
    nbytes = torch.empty(1, dtype=torch.int64, device="cpu")
    while True:
        probe.receive(nbytes)
        if int(nbytes) == 0:
            return
        if int(nbytes) > _NO_DATA:
            probe.receive(torch.empty(int(nbytes), dtype=torch.uint8, device="cpu"))
        probe.send(torch.empty(0, dtype=torch.uint8, device="cpu"))


def are_few(topology: Topology) -> bool:
    """Returns True if there are several links to compare, and few enough hosts and ranks to synthesize schedules."""
    return 2 < len(topology.hosts) <= MOST_HOSTS and len(topology.members) <= MOST_RANKS


def measure_pairs(
    formation: Formation, topology: Topology, links: Messages, deadline: float, wanted: bool | None = None
) -> dict[Pair, LinkCost]:
    """Measures the links between all pairs of hosts; returns the costs on rank 0. Each host's first rank calls this.

    Args:
        deadline: the time on the monotonic clock, in seconds, at which to stop waiting for the other ranks.
        wanted: whether to measure at all; passed only on rank 0.

    Raises:
        RendezvousError: a rank gave up or died.
        RendezvousTimeoutError: a rank did not measure in time.
    """
    n, found = len(topology.hosts), dict[Pair, LinkCost]()
    host = next(number for number, ranks in enumerate(topology.hosts) if topology.rank in ranks)
    for number in range(_PASSES):
        key = f"{_PASS_KEY}/{number}"
        if topology.rank == 0:
            is_due = bool(wanted) if number == 0 else bool(differences(n, found))
            formation.store.set(key, str(int(is_due)))
        else:
            _await(formation, topology, [key], deadline)
            is_due = formation.store.get(key) == b"1"
        if not is_due:
            break
        mine = _play_rounds(formation, topology, links, host)
        formation.store.set(f"{key}/{host}", json.dumps([[*pair, *cost] for pair, cost in mine.items()]))
        if topology.rank == 0:
            keys = [f"{key}/{other_host}" for other_host in range(n)]
            _await(formation, topology, keys, deadline)
            for text in formation.store.multi_get(keys):
                for one, other, alpha_s, beta_s_per_byte in json.loads(text):
                    note(found, (one, other), LinkCost(alpha_s, beta_s_per_byte))
    return found


def differences(n: int, found: Mapping[Pair, LinkCost]) -> str:
    """Returns the differences between the links of n hosts in PACELINE_NETWORK's format, or "" if there are none."""
    if not found:
        return ""
    return describe_differences(
        n, {pair: NetworkLink(cost.alpha_s, 1 / cost.beta_s_per_byte) for pair, cost in found.items()}
    )


def recalled(topology: Topology, known: KnownCosts) -> dict[Pair, LinkCost]:
    """Returns the known costs for all pairs of these hosts, keyed by host numbers, or {} if any of them is unknown."""
    keys = {pair: _names_of(topology, pair) for pair in combinations(range(len(topology.hosts)), 2)}
    return {pair: known.pairs[key] for pair, key in keys.items()} if known.pairs.keys() >= {*keys.values()} else {}


def remember(topology: Topology, known: KnownCosts, found: Mapping[Pair, LinkCost]) -> None:
    """Adds the measured costs for pairs of hosts to `known`."""
    known.pairs |= {_names_of(topology, pair): cost for pair, cost in found.items()}


def _names_of(topology: Topology, pair: Pair) -> tuple[str, str]:
    """Returns the key in `KnownCosts.pairs` for a pair of hosts."""
    first, second = sorted(topology.members[topology.hosts[host][0]].host for host in pair)
    return first, second


def _play_rounds(
    formation: Formation, topology: Topology, links: Messages, host: int
) -> dict[Pair, tuple[float, float]]:
    """Performs all rounds of the tournament; returns the costs of the links between this host and the other hosts."""
    mine = {}
    leaders = [ranks[0] for ranks in topology.hosts]
    for pairs in round_robin_rounds(len(leaders)):
        for pair in pairs:
            if host not in pair:
                continue
            probe = Probe(formation, topology, links, leaders[pair[1] if host == pair[0] else pair[0]])
            if host == pair[1]:
                answer(probe)
            cost = measure(probe)
            probe.end()
            mine[pair] = cost.alpha_s, cost.beta_s_per_byte
            if host == pair[0]:
                answer(probe)
    return mine


def note(found: dict[Pair, LinkCost], pair: Pair, cost: LinkCost) -> None:
    """Keeps the shortest times for a pair; a measured bandwidth replaces an assumed one."""
    before = found.get(pair, cost)
    if is_far(before.alpha_s) != is_far(cost.alpha_s):
        before = cost = min(before, cost, key=lambda candidate: candidate.alpha_s)
    found[pair] = LinkCost(min(before.alpha_s, cost.alpha_s), min(before.beta_s_per_byte, cost.beta_s_per_byte))


def _await(formation: Formation, topology: Topology, keys: list[str], deadline: float) -> None:
    waited_s = deadline - time.monotonic()
    if formation.absent(keys, deadline):
        raise RendezvousTimeoutError(
            f"{topology.members[topology.rank]}: not all hosts measured their links to each other within "
            f"{max(0.0, waited_s):.0f} s; look at the output of their first ranks"
        )


def agree_on_costs(
    formation: Formation, topology: Topology, links: Messages, known: KnownCosts, timeout_s: float
) -> tuple[CostModel, Network | None]:
    """Returns the same costs on all ranks: from PACELINE_COSTS on rank 0, from rank 0's `known`, or from a measurement.

    The network is also returned if PACELINE_NETWORK on rank 0 describes unequal links (see `read_network`), or if costs
    are neither set nor known and measurements between a few hosts reveal unequal links.

    The costs are added to `known` on all ranks, so later groups on these hosts form faster.

    PACELINE_COSTS is JSON: {"within_host": [alpha, beta], "between_hosts": [alpha, beta], "gamma": gamma}, with alpha
    in seconds per message, and beta and gamma in seconds per byte.

    Raises:
        ValueError: PACELINE_COSTS or PACELINE_NETWORK is malformed.
        RendezvousError: a rank gave up or died.
        RendezvousTimeoutError: rank 0 did not publish the costs in time.
    """
    deadline = time.monotonic() + timeout_s
    if topology.rank == 0:
        model, described, pairs = _measure_all(formation, topology, links, known, deadline)
        network = read_network(described, model, topology.hosts)
        formation.store.set(_COSTS_KEY, _format(model))
        formation.store.set(_PAIRS_KEY, json.dumps([[*pair, *astuple(cost)] for pair, cost in pairs.items()]))
        formation.store.set(_NETWORK_KEY, described)
    else:
        _answer_all(formation, topology, links, deadline)
        if formation.absent(_KEYS, deadline):
            raise RendezvousTimeoutError(
                f"{topology.members[topology.rank]}: {topology.members[0]} did not measure the cost of messages within "
                f"{timeout_s:.0f} s; look at its output"
            )
        costs, described, found = (value.decode() for value in formation.store.multi_get(_KEYS))
        model, pairs = parse_costs(costs), {(one, other): LinkCost(*cost) for one, other, *cost in json.loads(found)}
        network = read_network(described, model, topology.hosts)
    known.models[_measured_ranks(topology)] = model
    remember(topology, known, pairs)
    return model, network


def _measure_all(
    formation: Formation, topology: Topology, links: Messages, known: KnownCosts, deadline: float
) -> tuple[CostModel, str, dict[Pair, LinkCost]]:
    """Returns rank 0's model, the network in the format of PACELINE_NETWORK, and the costs for pairs of hosts."""
    given, described = os.environ.get(COSTS_VARIABLE), os.environ.get(NETWORK_VARIABLE, "")
    probes = [Probe(formation, topology, links, peer) for peer in _partners(topology)]
    model = parse_costs(given) if given else known.models.get(_measured_ranks(topology))
    if model is None:
        *within_host, between_hosts = map(measure, probes)
        gamma = _core.time_reduction(_REDUCED) / _REDUCED
        within = within_host[0] if within_host else UNMEASURED.within_host
        model = CostModel(within, between_hosts, gamma)
    for probe in probes:
        probe.end()
    pairs = {} if given else recalled(topology, known)
    if are_few(topology):
        wanted = not (given or described or known.models)
        pairs |= measure_pairs(formation, topology, links, deadline, wanted)
    return model, described or differences(len(topology.hosts), pairs), pairs


def _answer_all(formation: Formation, topology: Topology, links: Messages, deadline: float) -> None:
    """Replies to the messages that rank 0 and each host's first rank send to measure links."""
    if topology.rank in _partners(topology):
        answer(Probe(formation, topology, links, 0))
    if are_few(topology) and any(topology.rank == ranks[0] for ranks in topology.hosts):
        measure_pairs(formation, topology, links, deadline)


def _partners(topology: Topology) -> list[int]:
    """Returns the peers for rank 0's measurements: another rank on its host, if any, and a rank on the next host."""
    return [*topology.hosts[0][1:2], topology.hosts[1][0]]


def _measured_ranks(topology: Topology) -> tuple[str, ...]:
    """Returns the hosts on which the model is measured, each described by its name and number of measured ranks."""
    return tuple(f"{topology.members[ranks[0]].host} {min(len(ranks), 2)}" for ranks in topology.hosts[:2])


def _format(model: CostModel) -> str:
    return json.dumps(
        {
            "within_host": astuple(model.within_host),
            "between_hosts": astuple(model.between_hosts),
            "gamma": model.gamma_s_per_byte,
        }
    )
