"""Rendezvous of ranks by `env://`, `tcp://`, `file://`, an explicit store, or a handler that the user registered.

Every worker imports this module, so it avoids the slow imports of dataclasses, urllib and tempfile; `shared_store.py`
is imported only if an address requires it.
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
from paceline.comm.rendezvous.check_in import Claim, claim_rank, close_store_later
from paceline.comm.store.store import PrefixStore, Store
from paceline.durations import LONGEST_S
from paceline.errors import RendezvousError, RendezvousTimeoutError, StoreConnectionError

BUILT_IN = ("env", "tcp", "file")

Handler = Callable[..., Iterator[tuple[Store, int, int]]]

_RETRY_PAUSE_S = 0.05

_handlers: dict[str, Handler] = {}

# The number of rendezvous in this process for each address and for each store. A store that outlives a group keeps the
# group's keys, so each rendezvous uses this number as its own prefix. The number is the same on every rank, since all
# ranks create the same groups.
_met_at_address: Counter[str] = Counter()
_met_at_store: WeakKeyDictionary[Store, Counter[str]] = WeakKeyDictionary()


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Registers a handler for `init_method="SCHEME://..."`. The arguments are the same as for torch's function.

    `init_process_group` calls the handler on each rank and uses its first result. The ranks then check in at the
    returned store, as for any other address, and missing or duplicate ranks are reported.

    Args:
        scheme: the part of the address before "://", in upper or lower case.
        handler: a generator function `handler(url, timeout=timedelta(...), **kwargs)` that yields `(store, rank,
            world_size)`. All ranks must share the store. The rank and world size passed to `init_process_group` are
            appended to the address, for example "etcd://host/job?rank=0&world_size=2".

    Raises:
        RuntimeError: the scheme already has a handler, or is one of Paceline's own.
        ValueError: the scheme is not valid.

    >>> def meet_alone(url, timeout, **_):
    ...     from paceline import HashStore
    ...     yield HashStore(timeout), 0, 1
    >>> register_rendezvous_handler("alone", meet_alone)
    """
    name = scheme.lower()
    if not name or not name[0].isalpha() or not all(letter.isalnum() or letter in "+-." for letter in name):
        raise ValueError(f"{scheme!r} is not a valid scheme; pass the part before :// in an address, such as etcd")
    if name in BUILT_IN or name in _handlers:
        owner = "Paceline's own" if name in BUILT_IN else "registered already"
        raise RuntimeError(f"the rendezvous handler for {scheme}:// is {owner}; choose another scheme")
    _handlers[name] = handler


class RendezvousResult:
    """Result of a rendezvous. The store reports this process's death until `take_back_will(store)` is called."""

    def __init__(self, rank: int, world_size: int, store: Store, address: str | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store  # only the ranks in this rendezvous use it
        self.address = address  # the host that serves the store, if known


def rendezvous(
    init_method: str | None, store: Store | None, world_size: int, rank: int, timeout_s: float
) -> RendezvousResult:
    """Performs a rendezvous with the other ranks through a store.

    Args:
        init_method: "env://" (the default without a `store`), "tcp://host:port", "file:///path", or an address with a
            scheme registered by `register_rendezvous_handler`.
        store: a store that all ranks share, instead of `init_method`.
        world_size: the number of ranks; if -1, it is taken from the environment or the URL.
        rank: this process's rank; if -1, it is taken from the environment or the URL.
        timeout_s: the time to wait for the other ranks, in seconds; at most a hundred years.

    Raises:
        ValueError: an argument or the address is invalid.
        TypeError: `store` is not a Paceline store.
        RendezvousError, RendezvousTimeoutError: see `claim_rank`.
    """
    timeout_s = min(timeout_s, LONGEST_S)
    if store is not None:
        if init_method is not None:
            raise ValueError("init_method and store are mutually exclusive; pass one of them")
        if world_size < 0 or rank < 0:
            raise ValueError("store requires world_size and rank, because they cannot be determined otherwise")
        _check_rank(rank, world_size)
        if not isinstance(store, Store):
            kind = f"{type(store).__module__}.{type(store).__qualname__}"
            raise TypeError(
                f"rank {rank}: store is a {kind}; it must be one of Paceline's, such as paceline.TCPStore, or a "
                "subclass of Store. For a store of torch.distributed, call torch.distributed.init_process_group with "
                "the backend 'paceline'"
            )
        return _meet_at_store(store, f"paceline/{_next_at_store(store)}", rank, world_size, timeout_s)

    url = init_method if init_method is not None else "env://"
    scheme = url.partition(":")[0].lower()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # restarted workers may find their predecessors' store
    if scheme not in BUILT_IN:
        store, rank, world_size = _store_of_handler(url, scheme, rank, world_size, timeout_s)
        _check_rank(rank, world_size)
        prefix = f"paceline/{attempt}/{_next_at_address(url)}"
        return _meet_at_store(store, prefix, rank, world_size, timeout_s)
    open_store: Callable[[int, int, timedelta], Store] = environment.open_store
    if scheme == "env":
        rank, world_size = environment.rank_and_world_size(rank, world_size)
    else:
        from paceline.comm.rendezvous import shared_store

        rank, world_size = shared_store.rank_and_world_size_in_url(url, rank, world_size)
        if environment.is_served_by_launcher(url):
            url = "env://"
        else:
            open_store, attempt = partial(shared_store.open_store_at_url, url), "0"
    _check_rank(rank, world_size)
    prefix = f"paceline/{attempt}/{_next_at_address(url)}"
    return _meet(partial(open_store, rank, world_size), prefix, Claim.mine(rank, world_size), timeout_s)


def _meet_at_store(store: Store, prefix: str, rank: int, world_size: int, timeout_s: float) -> RendezvousResult:
    joined = PrefixStore(prefix, store)
    claim_rank(joined, Claim.mine(rank, world_size), timeout_s)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return RendezvousResult(rank, world_size, joined, getattr(store, "host", None))


def _store_of_handler(url: str, scheme: str, rank: int, world_size: int, timeout_s: float) -> tuple[Store, int, int]:
    """Returns the first store, rank and world size that the user's handler yields."""
    if scheme not in _handlers:
        raise ValueError(
            f"init_method {url!r} is not supported; use env://, tcp://host:port or file:///path, or "
            f"register_rendezvous_handler({scheme!r}, ...)"
        )
    results = _handlers[scheme](_with_rank(url, rank, world_size), timeout=timedelta(seconds=timeout_s))
    result = next(results, None) if isinstance(results, Iterator) else None
    if not isinstance(result, tuple) or len(result) != 3:
        raise ValueError(
            f"the rendezvous handler for {scheme}:// returned {result!r}; it must be a generator function that yields "
            "(store, rank, world_size)"
        )
    store, rank, world_size = result
    if not isinstance(store, Store):
        raise ValueError(
            f"the rendezvous handler for {scheme}:// yielded a {type(store).__name__} for a store; it must be one of "
            "Paceline's, such as TCPStore, FileStore or a subclass of Store"
        )
    return store, int(rank), int(world_size)


def _with_rank(url: str, rank: int, world_size: int) -> str:
    """Returns the address with the known rank and world size appended, as torch's handlers expect."""
    from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

    given = {name: value for name, value in (("rank", rank), ("world_size", world_size)) if value >= 0}
    if not given:
        return url
    split = urlsplit(url)
    query = parse_qsl(split.query, keep_blank_values=True)
    if twice := [name for name, _ in query if name in given]:
        raise ValueError(f"{' and '.join(twice)} is in {url!r} and is also an argument; leave one of them out")
    return urlunsplit(split._replace(query=urlencode([*query, *((name, str(value)) for name, value in given.items())])))


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
                    f"rank {claim.rank} waited {timeout_s:.0f} s for {claim.world_size} ranks; rank 0, which hosts the "
                    f"rendezvous, did not arrive: {error}"
                ) from error
            # The server belongs to an earlier process group at this address and is closing.
            time.sleep(_RETRY_PAUSE_S)
        except BaseException as error:
            if opened is None:
                raise
            ended = isinstance(error, RendezvousError) and not isinstance(error, RendezvousTimeoutError)
            if ended and getattr(opened, "serves", False):
                close_store_later(opened, PrefixStore(prefix, opened))
            else:
                opened.close()
            raise


def _check_rank(rank: int, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; with world_size {world_size} it must be from 0 to {world_size - 1}")


def _next_at_address(address: str) -> int:
    """Returns 1 for the first rendezvous at `address`, 2 for the second, and so on."""
    _met_at_address[address] += 1
    return _met_at_address[address]


def _next_at_store(store: Store) -> int:
    """Returns 1 for the first rendezvous at a store, 2 for the second, and so on; each prefix is counted separately."""
    prefix = ""
    while isinstance(store, PrefixStore):
        prefix = f"{store.prefix}/{prefix}"
        store = store.underlying_store
    rounds = _met_at_store.setdefault(store, Counter())
    rounds[prefix] += 1
    return rounds[prefix]
