"""A client's connection: HTTP/1.1 to and from the application (ASGI), within limits of time and size.

Knows nothing of what is served. It guards against heads and bodies that do not come, clients that do not read,
requests that are sent before the answer to the last one is read, and what is no HTTP at all. A client that has sent its
request and closes its own direction gets its answer; one that has gone is noticed, and the application is told.
"""

import asyncio
import json
import socket
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import h11
from starlette.types import ASGIApp

from workers.gateway.exchange import BUFFER_BYTES, REASONS, Exchange
from workers.gateway.limits import ApiLimits, S

LINGER_S, LINGER_BYTES = 5.0, 64 << 20  # how long, and how much of, a refused body is read and thrown away
LOOK_S = 0.25  # between looks at a connection that is not being read
PROBE_S = 0.6  # a client that closed its direction is asked whether it is there, if the answer takes so long
TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8  # include/net/tcp_states.h
REFUSED_HEADERS = b"Content-Type: application/json\r\nConnection: close\r\n\r\n"
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Owner(Protocol):
    """The holder of connections."""

    def run(self, exchange: Coroutine[Any, Any, None]) -> None:
        """Run an exchange to its end."""
        ...

    def lost(self, connection: "Connection") -> None:
        """Note that a connection is closed."""
        ...

    def seldom(self, what: str, message: str, *arguments: object) -> None:
        """Log what a client can bring about as often as it likes."""
        ...


class Connection(asyncio.Protocol):
    """Requests of one client, one after the other."""

    def __init__(self, app: ASGIApp, limits: ApiLimits, owner: Owner) -> None:
        self._app = app
        self._limits = limits
        self._most_head = limits.head_bytes
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.parser = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self.exchange: Exchange | None = None
        self._made = False
        self.heard_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._head_begun = False
        self._eof = False
        self._probe_at = 0.0
        self._discarded: int | None = None  # bytes thrown away since the connection began to end
        self._ends = False  # after the answer under way
        self.writable = asyncio.Event()
        self.writable.set()

    # -- asyncio.Protocol --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._made = True
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE:  # a client whose machine is gone sends no FIN
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._within(self._limits.head_ns / S, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.transport.abort()
            return
        self.parser.receive_data(data)
        self._advance()

    def eof_received(self) -> bool:
        """Note that the client sends no more. Whether it is there to read, only a write to it can tell."""
        self._eof = True
        if self._discarded is not None or self.exchange is None or self.exchange.more_body:
            return False  # nothing that could be answered: close
        self._look_on()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._timer, self._watch, self._stall):
            if timer is not None:
                timer.cancel()
        self.writable.set()
        if self.exchange is not None:
            self.exchange.leave()
        self._owner.lost(self)

    def pause_writing(self) -> None:
        self.writable.clear()
        self._await_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self.writable.set()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self.exchange is None and self._discarded is None:
            self.transport.resume_reading()
            self._advance()  # what was held back until the last answer was read

    # -- requests ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take what has come: heads, bodies, and what is neither."""
        while self._discarded is None and (self.exchange is not None or self.writable.is_set()):
            try:
                event = self.parser.next_event()
            except h11.RemoteProtocolError as error:
                self.refuse(error.error_status_hint, f"this is no HTTP/1.1 request: {error}")
                return
            if event is h11.NEED_DATA:
                self._await_head()
                return
            if event is h11.PAUSED:  # a further request, before this one is answered
                self.transport.pause_reading()
                self._look_on()
                return
            if isinstance(event, h11.Request):
                self._begin(event)
            elif self.exchange is None or isinstance(event, h11.ConnectionClosed):
                return
            elif isinstance(event, h11.Data):
                self.exchange.feed(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self.exchange.feed(None)
        if self._discarded is None:
            self.transport.pause_reading()  # the last answer is still to be read

    def _begin(self, request: h11.Request) -> None:
        if len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers) > self._most_head:
            self.refuse(431, f"the request's headers exceed {self._most_head} bytes; send fewer")
            return
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            self.refuse(400, "a request has Transfer-Encoding or Content-Length, not both")
            return
        if self._timer is not None:
            self._timer.cancel()
        self._head_begun = False
        self.exchange = Exchange(self.transport, self.parser, self.writable, self._answered, request)
        self._owner.run(self.exchange.run(self._app))

    def _await_head(self) -> None:
        """Once the first byte of a further request is here, the rest has to follow in time."""
        if self.exchange is None and not self._head_begun and self.parser.trailing_data[0]:
            self._head_begun = True
            self._within(self._limits.head_ns / S, self._head_is_late)

    def _answered(self) -> None:
        """Go on after an exchange that has been answered in whole."""
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        if self.transport.is_closing():
            return
        if exchange.more_body:
            self.linger()
        elif self.parser.our_state is h11.MUST_CLOSE or self._ends:
            self._close()
        else:
            self.parser.start_next_cycle()
            self._within(self._limits.keep_alive_ns / S, self._close)
            self.transport.resume_reading()
            self._advance()
            if self._eof and self.exchange is None and self.writable.is_set():
                self._close()

    # -- ends --------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether it waits for a client who has sent no whole request: nothing but this connection is lost with it."""
        if self.exchange is None:
            return self._made
        return self.exchange.more_body and not self.exchange.started

    def end(self) -> None:
        """Close it, after the answer under way."""
        self._ends = True
        if self.exchange is None:
            self._close()

    def refuse(self, status: int, message: str) -> None:
        """Answer what is no request, and close."""
        if self.exchange is not None:  # in the middle of a body: there is no telling where it ends
            self.exchange.leave()
            self.transport.close()
            return
        self._owner.seldom("refused", "%s was refused: %s", self.transport.get_extra_info("peername"), message[:200])
        error = {"message": message[:500], "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        start = f"HTTP/1.1 {status} {REASONS.get(status, '')}\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(start.encode() + REFUSED_HEADERS + body)
        self.linger()

    def linger(self) -> None:
        """Send no more, and throw away what still comes for a while: a reset could overtake the answer."""
        self._discarded = 0
        self._within(LINGER_S, self.transport.abort)
        if self._eof:
            self.transport.close()
        else:
            self.transport.resume_reading()
            self.transport.write_eof()

    def _close(self) -> None:
        """Close it once the client has taken what was written, for which it has only so long."""
        self.transport.close()
        if unread := self.transport.get_write_buffer_size():
            self._await_reader(unread)

    def _within(self, seconds: float, otherwise: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, otherwise)

    def _head_is_late(self) -> None:
        if self.parser.trailing_data[0]:
            self.refuse(408, f"the request's headers were not complete within {self._limits.head_ns / S:.0f} s")
        else:
            self.transport.close()

    def _await_reader(self, unread: int) -> None:
        """Let a client go that takes nothing of its answer for too long."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < unread:
                self._await_reader(left)
                return
            self._owner.seldom("unread", "a client took nothing of its answer for %.0f s and was let go", stall_s)
            self.transport.abort()

        stall_s = self._limits.unread_ns / S
        if self._stall is not None:
            self._stall.cancel()
        self._stall = self._loop.call_later(stall_s, look)

    # -- a client that may have gone ---------------------------------------------------------------------------

    def _look_on(self) -> None:
        """Look at the connection now and then: its end does not wake us while it is not being read."""
        if self._watch is None:
            self._probe_at = time.monotonic() + PROBE_S
            self._watch = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._watch = None
        if self.transport.is_closing() or self.exchange is None:
            return
        state = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state == TCP_CLOSE:
            self.transport.abort()
            return
        now = time.monotonic()
        if state == TCP_CLOSE_WAIT and now >= self._probe_at:
            # Has it closed both directions, or only its own? An interim answer, which every client skips (RFC 9110,
            # 15.2), or a comment in a stream, is met by a reset in the first case.
            self.exchange.probe()
            self._probe_at = now + 2 * PROBE_S
        self._watch = self._loop.call_later(LOOK_S / 4 if now + PROBE_S > self._probe_at else LOOK_S, self._look)
