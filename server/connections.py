"""Limits of connections: deadlines of each step, and their number.

uvicorn closes a connection that is idle after an answer. It waits without limit for the first request's head, for the
rest of a head, for the rest of a body after the answer, and for a client that does not read. Its limit_concurrency
refuses new connections while idle ones fill the limit, so that these could block the service.
"""

import asyncio
import socket
from collections.abc import Callable
from ssl import SSLContext
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

Waiter = asyncio.Future[None]

IDLE_S = 15  # from a connection's start, or its last answer, to the end of the next request's head; seconds
HANDSHAKE_S = 10.0  # a connection's TLS handshake; seconds


class Connection(H11Protocol):
    """A connection with deadlines. Above the limit, the connection that has waited longest for a request's head is
    closed: a client that opens many without a request takes them from itself or from similar clients."""

    connections_max: ClassVar[int]
    exchange_s: ClassVar[float]
    _step: object = None
    _deadline: asyncio.TimerHandle | None = None

    def handshake_begun(self, transport: asyncio.Transport, client: tuple[str, int] | None, done: Waiter) -> None:
        """Count the connection, under its deadline, from the start of its TLS handshake. done: the handshake's end."""
        self.transport, self.client = transport, client
        self.connections.add(self)
        done.add_done_callback(self._handshake_ended)
        self._watch()
        self._make_room()

    def _handshake_ended(self, done: Waiter) -> None:
        """Forget the connection if it failed, for then nothing else of the protocol is called."""
        if done.cancelled() or done.exception() is not None:
            self.connections.discard(self)
            if self._deadline is not None:
                self._deadline.cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    @property
    def _is_waiting(self) -> bool:
        """Return True between two requests, or with a part of a head."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Start the deadline of a new step; further bytes of the same step do not extend it."""
        if self.transport.is_closing():
            step: object = "close"
        else:
            step = "wait" if self._is_waiting else self.cycle
        if step is self._step:
            return
        self._step = step
        if self._deadline is not None:
            self._deadline.cancel()
        timeout_s = IDLE_S if isinstance(step, str) else self.exchange_s
        self._deadline = self.loop.call_later(timeout_s, self.transport.abort)

    def _make_room(self) -> None:
        """Enforce the limits of all connections, and of those from one address, which may have half of them."""
        everyone = [other for other in self.connections if isinstance(other, Connection)]
        own = [other for other in everyone if other._host == self._host]
        if len(own) > max(1, self.connections_max // 2):
            crowd = own
        elif len(everyone) > self.connections_max:
            crowd = everyone
        else:
            return
        waiting = [other for other in crowd if other is not self and other._is_waiting and other._deadline is not None]
        dropped = min(waiting, key=lambda other: other._ends_s, default=self)
        self.connections.discard(dropped)
        self.loop.call_soon(dropped.transport.abort)  # not now: asyncio may only be about to start its handshake

    @property
    def _host(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def _ends_s(self) -> float:
        """Return the deadline, by the loop's clock."""
        assert self._deadline is not None
        return self._deadline.when()


def bounded(connections_max: int, timeout_s: float) -> type[Connection]:
    """Return uvicorn's protocol class. timeout_s: of a request's body, of the start of its answer, and of the rest."""
    return type("BoundedConnection", (Connection,), {"connections_max": connections_max, "exchange_s": 3 * timeout_s})


class Loop(asyncio.SelectorEventLoop):
    """Event loop whose servers wait less than a minute for a TLS handshake, and count connections from its start on.
    uvicorn has no option for that, and learns of a connection only when its handshake is over."""

    def _make_ssl_transport(
        self, rawsock: socket.socket, protocol: asyncio.Protocol, sslcontext: SSLContext, waiter: Waiter, **more: Any
    ) -> asyncio.Transport:
        """Make the transport of an accepted connection. A method of asyncio's own."""
        transport: asyncio.Transport = super()._make_ssl_transport(  # type: ignore[misc]
            rawsock, protocol, sslcontext, waiter, **more
        )
        if isinstance(protocol, Connection):
            protocol.handshake_begun(transport, more["extra"]["peername"][:2], waiter)
        return transport

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        *,
        sock: socket.socket,
        ssl: SSLContext | None,
        backlog: int,
    ) -> asyncio.Server:
        timeout_s = None if ssl is None else HANDSHAKE_S
        return await super().create_server(
            protocol_factory, sock=sock, ssl=ssl, backlog=backlog, ssl_handshake_timeout=timeout_s
        )
