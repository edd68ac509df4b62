"""One client's connection: HTTP/1.1 to and from the application (ASGI), within limits of time and size.

Knows nothing of what is served. What it guards against: heads and bodies that do not come, clients that do not read,
requests that are sent before the answer to the last one is read, and what is no HTTP at all. A client that has sent its
request and closes its own direction gets its answer; one that has gone is noticed, and the application is told.
"""

import asyncio
import json
import socket
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message

from workers.gateway.limits import ApiLimits, S

if TYPE_CHECKING:
    from workers.gateway.listener import Listener

BUFFER_BYTES = 64 << 10  # of a body before the application takes it, and of an answer before the client does
LINGER_S, LINGER_BYTES = 5.0, 64 << 20  # how long, and how much of, a refused body is read and thrown away
LOOK_S = 0.25  # between looks at a connection that is not being read
PROBE_S = 0.6  # a client that closed its direction is asked whether it is there, if the answer takes so long
TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8  # include/net/tcp_states.h
REFUSED_HEADERS = b"Content-Type: application/json\r\nConnection: close\r\n\r\n"
REASONS = {status.value: status.phrase for status in HTTPStatus}
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Connection(asyncio.Protocol):
    """Requests of one client, one after the other."""

    def __init__(self, app: ASGIApp, limits: ApiLimits, listener: "Listener") -> None:
        self._app = app
        self._limits = limits
        self._most_head = limits.head_bytes
        self._listener = listener
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
        """The client sends no more. Whether it is there to read, only a write to it can tell."""
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
        self._listener.lost(self)

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
        self.exchange = Exchange(self, request)
        self._listener.run(self.exchange.run(self._app))

    def _await_head(self) -> None:
        """Once the first byte of a further request is here, the rest has to follow in time."""
        if self.exchange is None and not self._head_begun and self.parser.trailing_data[0]:
            self._head_begun = True
            self._within(self._limits.head_ns / S, self._head_is_late)

    def done(self) -> None:
        """The exchange has been answered in whole. Called by it."""
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
        """It waits for the client, who has sent no whole request; nothing but this connection is lost with it."""
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
        self._listener.seldom("refused", "%s was refused: %s", self.transport.get_extra_info("peername"), message[:200])
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
        """A client that takes nothing of its answer for too long is let go."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < unread:
                self._await_reader(left)
                return
            self._listener.seldom("unread", "a client took nothing of its answer for %.0f s and was let go", stall_s)
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


class Exchange:
    """One request and its answer: `receive` and `send` of ASGI."""

    def __init__(self, connection: Connection, request: h11.Request) -> None:
        self._connection = connection
        self._method = request.method.decode()
        self._version = request.http_version.decode()
        path, _, query = bytes(request.target).partition(b"?")
        transport = connection.transport
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._version,
            "server": transport.get_extra_info("sockname")[:2],
            "client": (transport.get_extra_info("peername") or ("", 0))[:2],
            "scheme": "http",
            "method": self._method,
            "root_path": "",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "headers": [(bytes(name), bytes(value)) for name, value in request.headers],
        }
        self._body = bytearray()
        self._news = asyncio.Event()
        self._head: bytes | None = None  # until there is a body to send it with
        self._gone = False
        self.more_body = True
        self._streams_events = False
        self.started = False
        self.complete = False

    def feed(self, data: bytes | None) -> None:
        """More of the body, or its end."""
        if data is None:
            self.more_body = False
        else:
            self._body += data
            if len(self._body) > BUFFER_BYTES:
                self._connection.transport.pause_reading()
        self._news.set()

    def leave(self) -> None:
        """The client has gone."""
        self._gone = True
        self._news.set()

    def probe(self) -> None:
        """Send something that changes nothing, so that a client that has gone shows itself.

        Before the answer that is an interim answer; within a stream of events a comment, which its readers skip (HTML,
        9.2.6). Of other answers that have begun the rest follows at once.
        """
        if not self._connection.writable.is_set() or self.complete:
            return
        if self._streams_events and self._head is None:
            comment = self._connection.parser.send_with_data_passthrough(h11.Data(data=b":\n\n"))
            self._write(b"".join(comment or ()))
        elif not self.started and self._version != "1.0":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._write(self._connection.parser.send(interim))

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self.receive, self.send)
            if not self.complete and not self._gone:
                raise RuntimeError("the application ended without an answer")
        finally:
            if not self.complete:
                self._connection.transport.abort()

    async def receive(self) -> Message:
        connection = self._connection
        if not self._gone and not self.complete:
            if connection.parser.they_are_waiting_for_100_continue and not self.started:
                interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self._write(connection.parser.send(interim))
            if self.more_body and not connection.transport.is_closing():
                connection.transport.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self._gone or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        connection = self._connection
        if not connection.writable.is_set():
            await connection.writable.wait()
        if self._gone:
            return
        if message["type"] == "http.response.start":
            headers = [(b"date", formatdate(usegmt=True).encode()), *message.get("headers", ())]
            if self.more_body:  # the rest of it will not be read: this connection ends
                headers.append((b"connection", b"close"))
            status = message["status"]
            response = h11.Response(status_code=status, headers=headers, reason=REASONS.get(status, "").encode())
            self._head = connection.parser.send(response)
            self.started = True
            self._streams_events = any(value.startswith(b"text/event-stream") for _, value in headers)
            return
        body = b"" if self._method == "HEAD" else message.get("body", b"")
        pieces = [self._head] if self._head else []
        self._head = None
        if body:  # unjoined: it may be of megabytes
            pieces += connection.parser.send_with_data_passthrough(h11.Data(data=body)) or ()
        self.complete = not message.get("more_body", False)
        if self.complete:
            pieces += connection.parser.send_with_data_passthrough(h11.EndOfMessage()) or ()
        if len(body) < BUFFER_BYTES:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            self._write(piece)
        if self.complete:
            self._news.set()
            connection.done()

    def _write(self, data: bytes | None) -> None:
        if data and not self._connection.transport.is_closing():
            self._connection.transport.write(data)
