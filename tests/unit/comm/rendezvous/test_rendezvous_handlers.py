"""`register_rendezvous_handler`: custom rendezvous, with torch's signature and Paceline's checks."""

from __future__ import annotations

import importlib
import inspect
from datetime import timedelta

import pytest

from paceline import HashStore, PrefixStore, RendezvousError, register_rendezvous_handler
from paceline.comm.rendezvous import rendezvous as rendezvous_module
from paceline.comm.rendezvous.check_in import Claim
from paceline.comm.rendezvous.rendezvous import rendezvous


@pytest.fixture(autouse=True)
def _own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "_handlers", {})
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


def test_a_handler_gets_the_address_with_what_is_known():
    seen = []

    def perform_rendezvous(url, timeout, **kwargs):
        seen.append((url, timeout, kwargs))
        yield HashStore(), 0, 1

    register_rendezvous_handler("Lobby", perform_rendezvous)
    joined = rendezvous("lobby://room/7?color=red", None, 1, 0, 5)
    assert (joined.rank, joined.world_size) == (0, 1)
    assert seen == [("lobby://room/7?color=red&rank=0&world_size=1", timedelta(seconds=5), {})]


def test_the_handler_may_decide_rank_and_world_size():
    def perform_rendezvous(url, **_):
        assert url == "lobby://room"
        yield HashStore(), 0, 1

    register_rendezvous_handler("lobby", perform_rendezvous)
    joined = rendezvous("lobby://room", None, -1, -1, 5)
    assert (joined.rank, joined.world_size) == (0, 1)


def test_each_rendezvous_at_an_address_has_keys_of_its_own():
    store = HashStore()

    def perform_rendezvous(url, **_):
        yield store, 0, 1

    register_rendezvous_handler("lobby", perform_rendezvous)
    first, second = (rendezvous("lobby://twice", None, -1, -1, 5) for _ in range(2))
    first.store.set("key", b"first")
    assert not second.store.check(["key"])


def test_a_rank_that_is_claimed_twice_is_named(monkeypatch):
    monkeypatch.setattr("paceline.comm.rendezvous.check_in._READERS_S", 0.1)  # the other rank never reads the verdict
    store = HashStore()
    PrefixStore("paceline/0/1", store).append("claims", Claim(0, 2, "elsewhere", 1).encode())

    def perform_rendezvous(url, **_):
        yield store, 0, 2

    register_rendezvous_handler("lobby", perform_rendezvous)
    with pytest.raises(RendezvousError, match="rank 0 was claimed twice: by process 1 on elsewhere"):
        rendezvous("lobby://claimed", None, -1, -1, 5)


@pytest.mark.parametrize("scheme", ["env", "tcp", "FILE", "lobby"])
def test_a_scheme_has_one_handler(scheme):
    register_rendezvous_handler("lobby", lambda *_, **__: iter(()))
    with pytest.raises(RuntimeError, match=f"handler for {scheme}:// is"):
        register_rendezvous_handler(scheme, lambda *_, **__: iter(()))


@pytest.mark.parametrize("scheme", ["", "7up", "a b", "tcp://"])
def test_what_is_no_scheme_is_refused(scheme):
    with pytest.raises(ValueError, match="is not a valid scheme"):
        register_rendezvous_handler(scheme, lambda *_, **__: iter(()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda *_, **__: None, "must be a generator function"),
        (lambda *_, **__: iter(()), "must be a generator function"),
        (lambda *_, **__: iter([(HashStore(), 0)]), "must be a generator function"),
        (lambda *_, **__: iter([({}, 0, 1)]), "yielded a dict for a store"),
        (lambda *_, **__: iter([(HashStore(), 3, 2)]), "rank is 3"),
    ],
)
def test_a_handler_that_is_wrong_is_named(given, said):
    register_rendezvous_handler("lobby", given)
    with pytest.raises(ValueError, match=said):
        rendezvous("lobby://wrong", None, -1, -1, 1)


def test_a_rank_that_is_given_twice_is_refused():
    register_rendezvous_handler("lobby", lambda *_, **__: iter([(HashStore(), 0, 1)]))
    with pytest.raises(ValueError, match=r"rank is in .* and is also an argument"):
        rendezvous("lobby://twice-given?rank=0", None, -1, 0, 1)


def test_an_unknown_scheme_says_how_to_make_it_known():
    with pytest.raises(ValueError, match=r"register_rendezvous_handler\('etcd'"):
        rendezvous("etcd://host/job", None, 1, 0, 1)


def test_the_signature_is_torchs():
    theirs = inspect.signature(importlib.import_module("torch.distributed.rendezvous").register_rendezvous_handler)
    assert list(inspect.signature(register_rendezvous_handler).parameters) == list(theirs.parameters)
