"""Helpers for tests of state transfers in one process: a model, senders that serve its state, and logged results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from paceline.comm.security.secret import derive_key, job_secret
from paceline.comm.store.tcp_store import listen
from paceline.train.elastic.agreement import BatchAssignment
from paceline.train.elastic.protocol import TransferOffer
from paceline.train.elastic.state_transfer.receiver import StateReceiver
from paceline.train.elastic.state_transfer.sender import KEY, Snapshot
from paceline.train.elastic.state_transfer.transfer_protocol import RoundResult
from paceline.train.elastic.training_state import TrainingState
from paceline.train.module_tensors import digest_of, memory_of

DEALT = BatchAssignment(7, ("a", "b"))


def result(round_: int, *tensors: torch.Tensor, state: int = 0) -> tuple[RoundResult, list[memoryview]]:
    memories = [memoryview(bytes(memory_of(each))) for each in tensors]
    kinds = tuple((str(each.dtype), tuple(each.shape)) for each in tensors)
    return RoundResult(round_, sum(map(len, memories)), kinds, digest_of(tensors), state, DEALT), memories


class Model:
    """A network, an optimizer with state, and the objects that are needed to serve them."""

    def __init__(self, seed: int, size: int = 1200) -> None:
        torch.manual_seed(seed)
        self.module = nn.Linear(size, size)  # more than one chunk
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.module(torch.ones(1, size)).sum().backward()
        self.optimizer.step()
        self.registry = TrainingState(self.module, {"optimizer": self.optimizer})


class Donor:
    """A snapshot of a model, and the address at which it is served."""

    def __init__(self, model: Model, name: str, number: int = 5, round_: int = 7) -> None:
        listener = listen("127.0.0.1", 0, job_secret())
        self.offer = TransferOffer(number, name, round_, f"127.0.0.1:{listener.getsockname()[1]}")
        key = derive_key(job_secret(), KEY)
        self.snapshot = Snapshot(number, model.registry, round_, 99, DEALT, listener, key)


@pytest.fixture
def sender() -> Iterator[Callable[..., Donor]]:
    with ExitStack() as closing:

        def make(*arguments: object, **rest: object) -> Donor:
            made = Donor(*arguments, **rest)
            closing.callback(made.snapshot.close)
            return made

        yield make


def learn(*offers: TransferOffer) -> StateReceiver:
    return StateReceiver(lambda: offers, lambda: False)
