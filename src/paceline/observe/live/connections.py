"""The connections to the page: how long and how many they may be before one of their requests has shown the token."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.security.peers import origin_of
from paceline.security.pending_connections import PendingConnections

ENTRANCE_S = 10.0  # from the connection to a request that passes, however many come before
_MOST_PENDING = 64


class PageConnections:
    """Limits the connections that have not shown the token; others may stay as long and be as many as they like.

    Any user of the machine can connect to the page, and one who stays silent must not keep out the page's own user.
    """

    def __init__(self) -> None:
        self._pending: PendingConnections[asyncio.Transport] = PendingConnections(_MOST_PENDING, _origin_of)
        self._by_address: dict[object, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def opened(self, transport: asyncio.Transport) -> None:
        """Takes in a connection, which may cost another one."""
        peer = transport.get_extra_info("peername")
        if not isinstance(peer, tuple):  # a Unix socket, which only its user can open
            return
        timer = asyncio.get_running_loop().call_later(ENTRANCE_S, self._end, transport)
        self._by_address[peer[:2]] = transport, timer
        crowded_out = self._pending.add(transport)
        if crowded_out is not None:
            crowded_out.abort()

    def passed(self, client: object) -> None:
        """Notes that a request has shown the token; `client` is the address of its connection."""
        if isinstance(client, (tuple, list)) and (found := self._by_address.get(tuple(client))) is not None:
            self._pending.remove(found[0])
            found[1].cancel()

    def closed(self, transport: asyncio.Transport) -> None:
        """Forgets a connection that has ended."""
        self._pending.remove(transport)
        peer = transport.get_extra_info("peername")
        found = self._by_address.pop(peer[:2], None) if isinstance(peer, tuple) else None
        if found is not None:
            found[1].cancel()

    def _end(self, transport: asyncio.Transport) -> None:
        if self._pending.remove(transport):
            transport.abort()


def _origin_of(transport: asyncio.Transport) -> str:
    return origin_of(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))


def protocol_of(connections: PageConnections) -> type[H11Protocol]:
    """Returns the protocol by which the server speaks to each connection, which `connections` is told of."""

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.opened(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.closed(self.transport)
            super().connection_lost(exc)

    return LimitedProtocol
