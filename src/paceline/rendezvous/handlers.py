"""Keeps the rendezvous handlers that users register for schemes of their own, as torch.distributed does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from paceline.store.base import Store

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
