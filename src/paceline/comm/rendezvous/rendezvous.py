"""Meets the other ranks by `env://`, `tcp://`, `file://` or an explicit store; the result has the ranks' store.

A broken rule is a `ValueError` that names the rule and the fix. Every worker pays for the imports of this module, so
each kind of address has a module of its own, and nothing here needs dataclasses, urllib or tempfile.

Keeps the rendezvous handlers that users register for schemes of their own, as torch.distributed does.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

from paceline.comm.rendezvous import environment
from paceline.comm.rendezvous.check_in import Claim, claim_rank
from paceline.comm.store.store import PrefixStore, Store
from paceline.durations import LONGEST_S
from paceline.errors import RendezvousError, RendezvousTimeoutError, StoreConnectionError

BUILT_IN = ("env", "tcp", "file")

Handler = Callable[..., Iterator[tuple[Store, int, int]]]

_handlers: dict[str, Handler] = {}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Registers how ranks meet at `init_method="SCHEME://..."`, with the arguments of torch's function of this name.

    `init_process_group` calls the handler on each rank and takes the first result. The ranks then agree in the store as
    they do with every other address: a rank that is missing or claimed twice is named.

    Args:
        scheme: the part of the address before "://", in any case.
        handler: a generator function `handler(url, timeout=timedelta(...), **kwargs)` that yields `(store, rank,
            world_size)`. The store is one that all ranks share. The rank and world size that were given to
            `init_process_group` are in the address, as in "etcd://host/job?rank=0&world_size=2".

    Raises:
        RuntimeError: the scheme has a handler already, or is one of Paceline's own.
        ValueError: the scheme is not the beginning of an address.

    >>> def meet_alone(url, timeout, **_):
    ...     from paceline import HashStore
    ...     yield HashStore(timeout), 0, 1
    >>> register_rendezvous_handler("alone", meet_alone)
    """
    name = scheme.lower()
    if not name or not name[0].isalpha() or not all(each.isalnum() or each in "+-." for each in name):
        raise ValueError(f"{scheme!r} is not a scheme: it is the part before :// in an address, such as etcd")
    if name in BUILT_IN or name in _handlers:
        owner = "Paceline's own" if name in BUILT_IN else "registered already"
        raise RuntimeError(f"the rendezvous handler for {scheme}:// is {owner}; choose another scheme")
    _handlers[name] = handler


def has_handler(scheme: str) -> bool:
    """Returns whether there is a handler for a scheme, given in small letters."""
    return scheme in _handlers


def meet_by_handler(url: str, rank: int, world_size: int, timeout_s: float) -> tuple[Store, int, int]:
    """Returns the store, rank and world size that the handler of the address's scheme yields first.

    Raises:
        ValueError: the handler yields nothing, or something else.
    """
    scheme = url.partition(":")[0].lower()
    found = _handlers[scheme](_with_place(url, rank, world_size), timeout=timedelta(seconds=timeout_s))
    place = next(found, None) if isinstance(found, Iterator) else None
    if not isinstance(place, tuple) or len(place) != 3:
        raise ValueError(
            f"the rendezvous handler for {scheme}:// gave {place!r}; it must be a generator function that yields "
            "(store, rank, world_size)"
        )
    store, rank, world_size = place
    if not isinstance(store, Store):
        raise ValueError(
            f"the rendezvous handler for {scheme}:// yielded a {type(store).__name__} for a store; it must be one of "
            "Paceline's, such as TCPStore, FileStore or a subclass of Store"
        )
    return store, int(rank), int(world_size)


def _with_place(url: str, rank: int, world_size: int) -> str:
    """Returns the address with the rank and world size that are known, as torch's handlers expect them.

    Raises:
        ValueError: the address has them already.
    """
    from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

    given = {name: value for name, value in (("rank", rank), ("world_size", world_size)) if value >= 0}
    if not given:
        return url
    split = urlsplit(url)
    query = parse_qsl(split.query, keep_blank_values=True)
    if twice := [name for name, _ in query if name in given]:
        raise ValueError(f"{' and '.join(twice)} stands in {url!r} and is an argument as well; leave one of them out")
    return urlunsplit(split._replace(query=urlencode([*query, *((name, str(value)) for name, value in given.items())])))


_RETRY_PAUSE_S = 0.05


# How often this process has met others at a place. A store that outlives a group keeps the names of the group's ranks,
# so each meeting gets a prefix of its own: the number is the same on every rank, since every rank makes the same
# groups.
_met_at_address: Counter[str] = Counter()
_met_at_store: WeakKeyDictionary[Store, Counter[str]] = WeakKeyDictionary()


class RendezvousResult:
    """The result of a rendezvous.

    Only the ranks of this meeting use `store`; `address` is the host at which they met, or None if there is none. The
    ranks hear of this process's death until `verdict.take_back_will(store)`.
    """

    def __init__(self, rank: int, world_size: int, store: Store, address: str | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.address = address


def rendezvous(
    init_method: str | None, store: Store | None, world_size: int, rank: int, timeout_s: float
) -> RendezvousResult:
    """Meets the other ranks.

    Args:
        init_method: "env://" (if neither it nor `store` is given), "tcp://host:port", "file:///path", or an address
            for which `register_rendezvous_handler` has a handler.
        store: a store that all ranks share, instead of `init_method`.
        world_size: the number of ranks; -1 takes it from the environment or the URL.
        rank: this process's rank; -1 takes it from there too.
        timeout_s: how long to wait for the others, in seconds; a hundred years at most.

    Raises:
        ValueError: a rule is broken.
        RendezvousError, RendezvousTimeoutError: see `agree`.
    """
    timeout_s = min(timeout_s, LONGEST_S)
    if store is not None:
        if init_method is not None:
            raise ValueError("init_method and store exclude each other; give one of them")
        if world_size < 0 or rank < 0:
            raise ValueError("with store, world_size and rank must be given, since there is nowhere to read them from")
        _check_place(rank, world_size)
        joined = PrefixStore(f"paceline/{_next_at_store(store)}", store)
        claim_rank(joined, Claim.mine(rank, world_size), timeout_s)
        return RendezvousResult(rank, world_size, joined, _host_of(store))

    url = init_method if init_method is not None else "env://"
    scheme = url.partition(":")[0].lower()
    if scheme not in ("env", "tcp", "file"):
        return _meet_by_handler(url, scheme, rank, world_size, timeout_s)
    open_store: Callable[[int, int, timedelta], Store] = environment.open_store
    attempt = "0"
    if scheme == "env":
        rank, world_size = environment.rank_and_world_size(rank, world_size)
    else:
        from paceline.comm.rendezvous import shared_store

        rank, world_size = shared_store.rank_and_world_size_in_url(url, rank, world_size)
        if shared_store.is_served_by_launcher(url):
            url = "env://"
        else:
            open_store = partial(shared_store.open_store_at_url, url)
    if open_store is environment.open_store:
        # Workers that the launcher has restarted may meet in the same store as those before them.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", attempt)
    _check_place(rank, world_size)
    prefix = f"paceline/{attempt}/{_next_at_address(url)}"
    return _meet(partial(open_store, rank, world_size), prefix, Claim.mine(rank, world_size), timeout_s)


def _meet_by_handler(url: str, scheme: str, rank: int, world_size: int, timeout_s: float) -> RendezvousResult:

    if not has_handler(scheme):
        raise ValueError(
            f"init_method {url!r} is not known; use env://, tcp://host:port or file:///path, or "
            f"register_rendezvous_handler({scheme!r}, ...)"
        )
    store, rank, world_size = meet_by_handler(url, rank, world_size, timeout_s)
    _check_place(rank, world_size)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    joined = PrefixStore(f"paceline/{attempt}/{_next_at_address(url)}", store)
    claim_rank(joined, Claim.mine(rank, world_size), timeout_s)
    return RendezvousResult(rank, world_size, joined, _host_of(store))


def _meet(open_store: Callable[[timedelta], Store], prefix: str, claim: Claim, timeout_s: float) -> RendezvousResult:
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        opened: Store | None = None
        try:
            opened = open_store(timedelta(seconds=left_s))
            joined = PrefixStore(prefix, opened)
            claim_rank(joined, claim, left_s)
            return RendezvousResult(claim.rank, claim.world_size, joined, getattr(opened, "host", None))
        except StoreConnectionError as error:
            if opened is not None:
                opened.close()
            if claim.rank == 0:
                raise
            if time.monotonic() >= deadline:
                raise RendezvousTimeoutError(
                    f"rank {claim.rank} waited {timeout_s:.0f} s for {claim.world_size} ranks; rank 0, at whose "
                    f"address they meet, did not arrive: {error}"
                ) from error
            # The server was just closing: it belonged to an earlier process group at this address.
            time.sleep(_RETRY_PAUSE_S)
        except BaseException as error:
            if opened is None:
                raise
            ended = isinstance(error, RendezvousError) and not isinstance(error, RendezvousTimeoutError)
            if ended and getattr(opened, "serves", False):
                from paceline.comm.rendezvous.check_in import close_store_later

                close_store_later(opened, PrefixStore(prefix, opened))
            else:
                opened.close()
            raise


def _check_place(rank: int, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; with world_size {world_size} it must be from 0 to {world_size - 1}")


def _next_at_address(address: str) -> int:
    """Returns 1 for the first meeting at `address`, 2 for the second, and so on."""
    _met_at_address[address] += 1
    return _met_at_address[address]


def _host_of(store: Store) -> str | None:
    """Returns the host that serves a store; None if it is not known."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host: str | None = getattr(store, "host", None)
    return host


def _next_at_store(store: Store) -> int:
    """Returns the same for a store; another view of it with the same prefix is the same place."""
    prefix = ""
    while isinstance(store, PrefixStore):
        prefix = f"{store.prefix}/{prefix}"
        store = store.underlying_store
    rounds = _met_at_store.setdefault(store, Counter())
    rounds[prefix] += 1
    return rounds[prefix]
