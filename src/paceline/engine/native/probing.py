"""Measures what a message to another rank costs, by round trips within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from paceline.engine.algorithms import UNMEASURED
from paceline.engine.channel import Message, Messages, Pieces
from paceline.engine.codes import DTYPE_CODES
from paceline.engine.formation import Formation
from paceline.engine.native.topology import Topology
from paceline.errors import RendezvousError
from paceline.schedule.cost import LinkCost

_SHORT_S = 0.02  # for short messages
_LONG_S = 0.1  # for long ones
_FAR_S = 0.0025
_LONG, _BULK = 64 << 10, 512 << 10
_TRIES = 3
_TIMEOUT_NS = 60_000_000_000
_LOOK_NS = 200_000_000  # a rank that waits for a message looks this often whether another has given up
_ALONE = 1  # as a number of bytes: no message follows the number


class Probe:
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


def is_far(alpha_s: float) -> bool:
    """Returns whether long messages would take too long to say much, so that a link's rate is not measured."""
    return alpha_s >= _FAR_S


def measure(probe: Probe) -> LinkCost:
    """Measures round trips within a time budget; of several the shortest counts, since a rank may be busy for a moment.

    Each round trip begins with a number that says how many bytes follow it, and the answer is empty. The number 0 (see
    `Probe.end`) ends the measurement. The first one does not count: the other rank may still be busy elsewhere.
    """

    def best_of(nbytes: int, most: int, budget_s: float) -> float:
        best, deadline = float("inf"), time.monotonic() + budget_s
        for _ in range(most):
            before = time.monotonic()
            probe.send(torch.tensor([nbytes], device="cpu"))
            if nbytes > _ALONE:
                probe.send(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))
            probe.receive(torch.empty(0, dtype=torch.uint8, device="cpu"))
            best = min(best, time.monotonic() - before)
            if time.monotonic() > deadline:
                break
        return best

    best_of(_ALONE, 1, 0.0)
    alpha_s = best_of(_ALONE, 10, _SHORT_S) / 2
    if is_far(alpha_s):
        return LinkCost(alpha_s, UNMEASURED.between_hosts.beta_s_per_byte)
    # A large message is offered before it is sent, so it takes two round trips. On a slow link shorter ones must do.
    nbytes, took_s = _LONG, best_of(_LONG, _TRIES, _LONG_S)
    if took_s < _LONG_S / 4:
        nbytes, took_s = _BULK, best_of(_BULK, _TRIES, _LONG_S)
    return LinkCost(alpha_s, max(1e-12, (took_s - 4 * alpha_s) / nbytes))


def answer(probe: Probe) -> None:
    """Answers the messages of `measure`, on the other rank."""
    nbytes = torch.empty(1, dtype=torch.int64, device="cpu")
    while True:
        probe.receive(nbytes)
        if int(nbytes) == 0:
            return
        if int(nbytes) > _ALONE:
            probe.receive(torch.empty(int(nbytes), dtype=torch.uint8, device="cpu"))
        probe.send(torch.empty(0, dtype=torch.uint8, device="cpu"))
