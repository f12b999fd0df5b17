"""What tests of lessons need in one process: a model, donors that serve its state, and results as they are logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from paceline.elastic.dealings import Dealt
from paceline.elastic.joining.donors import KEY
from paceline.elastic.joining.learner import Learner
from paceline.elastic.joining.snapshot import Snapshot
from paceline.elastic.joining.wire import Result
from paceline.elastic.messages import Learn
from paceline.elastic.registry import Registry
from paceline.parallel.digests import digest_of, memory_of
from paceline.security.secret import derive_key, job_secret
from paceline.store.tcp import listen

DEALT = Dealt(7, ("a", "b"))


def result(round_: int, *tensors: torch.Tensor, state: int = 0) -> tuple[Result, list[memoryview]]:
    memories = [memoryview(bytes(memory_of(each))) for each in tensors]
    kinds = tuple((str(each.dtype), tuple(each.shape)) for each in tensors)
    return Result(round_, sum(map(len, memories)), kinds, digest_of(tensors), state, DEALT), memories


class Model:
    """A network, an optimizer with a state, and what is needed to serve them."""

    def __init__(self, seed: int, size: int = 1200) -> None:
        torch.manual_seed(seed)
        self.module = nn.Linear(size, size)  # more than one chunk
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.module(torch.ones(1, size)).sum().backward()
        self.optimizer.step()
        self.registry = Registry(self.module, {"optimizer": self.optimizer})


class Donor:
    """A snapshot of a model, and where it is served."""

    def __init__(self, model: Model, name: str, number: int = 5, round_: int = 7) -> None:
        listener = listen("127.0.0.1", 0, job_secret())
        self.offer = Learn(number, name, round_, f"127.0.0.1:{listener.getsockname()[1]}")
        key = derive_key(job_secret(), KEY)
        self.snapshot = Snapshot(number, model.registry, round_, 99, DEALT, listener, key)


@pytest.fixture
def donor() -> Iterator[Callable[..., Donor]]:
    with ExitStack() as closing:

        def make(*arguments: object, **rest: object) -> Donor:
            made = Donor(*arguments, **rest)
            closing.callback(made.snapshot.close)
            return made

        yield make


def learn(*offers: Learn) -> Learner:
    return Learner(lambda: offers, lambda: False)
