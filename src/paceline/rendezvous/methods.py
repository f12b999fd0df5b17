"""`env://`, `tcp://`, `file://` and an explicit store: from an address to a store and this process's place.

Broken rules are `ValueError`s that name the rule and the fix.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

from paceline.durations import LONGEST_S
from paceline.errors import PacelineError, RendezvousError, RendezvousTimeoutError, StoreConnectionError
from paceline.rendezvous.claims import Claim, agree
from paceline.rendezvous.rounds import next_at_address, next_at_store
from paceline.security.secret import job_secret
from paceline.store.base import Store
from paceline.store.file import FileStore
from paceline.store.prefix import PrefixStore
from paceline.store.remote import connect_unix
from paceline.store.tcp import PortInUseError, TCPStore

_RETRY_PAUSE_S = 0.05
_ANOTHER_RANK_0 = timedelta(seconds=5)


@dataclass(frozen=True)
class Joined:
    """The result of a rendezvous.

    `store` is empty but for the ranks of this meeting; `address` is the host at which they met, if there is one.
    """

    rank: int
    world_size: int
    store: Store
    address: str | None = None


def rendezvous(init_method: str | None, store: Store | None, world_size: int, rank: int, timeout_s: float) -> Joined:
    """Meets the other ranks.

    Args:
        init_method: "env://" (if neither it nor `store` is given), "tcp://host:port" or "file:///path".
        store: a store that all ranks share, instead of `init_method`.
        world_size: the number of ranks; -1 to take it from the environment or the URL.
        rank: this process's rank; -1 likewise.
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
        joined = PrefixStore(f"paceline/{next_at_store(store)}", store)
        agree(joined, Claim.mine(rank, world_size), timeout_s)
        return Joined(rank, world_size, joined, getattr(store, "host", None))

    url = init_method if init_method is not None else "env://"
    split = urlsplit(url)
    if split.scheme not in ("env", "tcp", "file"):
        raise ValueError(f"init_method {url!r} is not known; use env://, tcp://host:port or file:///path")
    rank, world_size = _place(split, rank, world_size)
    _check_place(rank, world_size)
    # Workers that the launcher started anew meet in the same store as those before them.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if split.scheme == "env" else "0"
    prefix = f"paceline/{attempt}/{next_at_address(url)}"
    return _meet(split, url, prefix, Claim.mine(rank, world_size), timeout_s)


def _meet(split: SplitResult, url: str, prefix: str, claim: Claim, timeout_s: float) -> Joined:
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        opened: Store | None = None
        try:
            opened = _open(split, url, claim, timedelta(seconds=left_s))
            joined = PrefixStore(prefix, opened)
            agree(joined, claim, left_s)
            return Joined(claim.rank, claim.world_size, joined, getattr(opened, "host", None))
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
            # The server was just being closed: it was of an earlier process group at this address.
            time.sleep(_RETRY_PAUSE_S)
        except BaseException:
            if opened is not None:
                opened.close()
            raise


def _place(split: SplitResult, rank: int, world_size: int) -> tuple[int, int]:
    if split.scheme == "env":
        return (
            rank if rank >= 0 else _number("RANK", "rank"),
            world_size if world_size >= 0 else _number("WORLD_SIZE", "world_size"),
        )
    query = parse_qs(split.query)
    if rank < 0 and "rank" in query:
        rank = _whole(query["rank"][0], "rank", split)
    if world_size < 0 and "world_size" in query:
        world_size = _whole(query["world_size"][0], "world_size", split)
    if rank < 0 or world_size < 0:
        missing = " and ".join(name for name, value in (("rank", rank), ("world_size", world_size)) if value < 0)
        raise ValueError(
            f"{split.scheme}:// needs {missing} as arguments of init_process_group; it has no other source"
        )
    return rank, world_size


def _whole(value: str, name: str, split: SplitResult) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} in {split.geturl()!r} is {value!r}; it must be a whole number") from None


def _number(variable: str, argument: str) -> int:
    value = _variable(variable, f", or pass {argument}= to init_process_group")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"the environment variable {variable} is {value!r}; it must be a whole number") from None


def _variable(name: str, otherwise: str = "") -> str:
    value = os.environ.get(name)
    if value is None:
        raise ValueError(
            f"env:// needs the environment variable {name}, which is not set; start the script with `paceline run`"
            f"{otherwise}"
        )
    return value


def _check_place(rank: int, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; with world_size {world_size} it must be from 0 to {world_size - 1}")


def _open(split: SplitResult, url: str, claim: Claim, timeout: timedelta) -> Store:
    if split.scheme == "file":
        if split.netloc or not split.path:
            raise ValueError(f"{url!r} must name an absolute path after three slashes: file:///shared/path")
        return FileStore(unquote(split.path), claim.world_size, timeout)
    if split.scheme == "tcp":
        try:
            host, port = split.hostname, split.port
        except ValueError as error:
            raise ValueError(f"{url!r}: {error}") from None
        if not host or not port:
            raise ValueError(f"{url!r} must name rank 0's host and a port: tcp://host:port, tcp://[::1]:port for IPv6")
        return _serve_or_connect(host, port, claim, timeout)
    return _from_environment(claim, timeout)


def _from_environment(claim: Claim, timeout: timedelta) -> Store:
    served = os.environ.get("PACELINE_STORE")
    if served is not None:
        if not served.startswith("unix:"):
            raise ValueError(f"PACELINE_STORE is {served!r}; it must be unix:PATH, as `paceline run` sets it")
        return connect_unix(served.removeprefix("unix:"), job_secret(), timeout)
    host = _variable("MASTER_ADDR")
    port = _number("MASTER_PORT", "init_method='tcp://host:port'")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _beside_torchrun(port, claim.world_size, timeout)
    return _serve_or_connect(host, port, claim, timeout)


def _serve_or_connect(host: str, port: int, claim: Claim, timeout: timedelta) -> Store:
    def connect(serve: bool, within: timedelta) -> Store:
        store = TCPStore(host, port, claim.world_size, serve, within, wait_for_workers=False)
        store.set_timeout(timeout)
        return store

    if claim.rank != 0:
        return connect(False, timeout)
    try:
        return connect(True, timeout)
    except PortInUseError as error:
        # If another process that was told to be rank 0 serves there, all ranks have to hear of it.
        try:
            return connect(False, min(timeout, _ANOTHER_RANK_0))
        except (PacelineError, OSError):
            raise error from None


def _beside_torchrun(port: int, world_size: int, timeout: timedelta) -> Store:
    """Under torchrun MASTER_PORT is served by torchrun itself, in a language of its own; one machine has files."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise ValueError(
            "torchrun holds MASTER_PORT for a store of its own, so ranks on several machines cannot meet there; "
            "give init_method='tcp://host:port' with another port"
        )
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = quote(f"{run}-{port}-{attempt}", safe="")
    return FileStore(os.path.join(_own_directory(), name), world_size, timeout)


def _own_directory() -> str:
    """A directory that no other user can put files into."""
    path = os.path.join(tempfile.gettempdir(), f"paceline-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    state = os.lstat(path)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise RendezvousError(
            f"{path}, where ranks under torchrun meet, is not a directory of user {os.getuid()} alone, so others could "
            "join the job; remove it, set TMPDIR to another place, or start with `paceline run`"
        )
    return path
