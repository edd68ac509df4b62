"""A request and its answer on an HTTP/1.1 connection, as the application (ASGI) receives and sends them."""

import asyncio
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message

BUFFER_BYTES = 64 << 10  # of a body before the application takes it, and of an answer before the client does
REASONS = {status.value: status.phrase for status in HTTPStatus}


class Exchange:
    """One request and its answer: `receive` and `send` of ASGI.

    `writable` is set while the client takes what it is sent; `on_answered` is called when the answer is complete.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        parser: h11.Connection,
        writable: asyncio.Event,
        on_answered: Callable[[], None],
        request: h11.Request,
    ) -> None:
        self._transport = transport
        self._parser = parser
        self._writable = writable
        self._on_answered = on_answered
        self._method = request.method.decode()
        self._version = request.http_version.decode()
        path, _, query = bytes(request.target).partition(b"?")
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
                self._transport.pause_reading()
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
        if not self._writable.is_set() or self.complete:
            return
        if self._streams_events and self._head is None:
            comment = self._parser.send_with_data_passthrough(h11.Data(data=b":\n\n"))
            self._write(b"".join(comment or ()))
        elif not self.started and self._version != "1.0":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._write(self._parser.send(interim))

    async def run(self, app: ASGIApp) -> None:
        """Have the application answer it."""
        try:
            await app(self._scope, self.receive, self.send)
            if not self.complete and not self._gone:
                raise RuntimeError("the application ended without an answer")
        finally:
            if not self.complete:
                self._transport.abort()

    async def receive(self) -> Message:
        if not self._gone and not self.complete:
            if self._parser.they_are_waiting_for_100_continue and not self.started:
                interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self._write(self._parser.send(interim))
            if self.more_body and not self._transport.is_closing():
                self._transport.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self._gone or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        if not self._writable.is_set():
            await self._writable.wait()
        if self._gone:
            return
        if message["type"] == "http.response.start":
            headers = [(b"date", formatdate(usegmt=True).encode()), *message.get("headers", ())]
            if self.more_body:  # the rest of it will not be read: this connection ends
                headers.append((b"connection", b"close"))
            status = message["status"]
            response = h11.Response(status_code=status, headers=headers, reason=REASONS.get(status, "").encode())
            self._head = self._parser.send(response)
            self.started = True
            self._streams_events = any(value.startswith(b"text/event-stream") for _, value in headers)
            return
        body = b"" if self._method == "HEAD" else message.get("body", b"")
        pieces = [self._head] if self._head else []
        self._head = None
        if body:  # unjoined: it may be of megabytes
            pieces += self._parser.send_with_data_passthrough(h11.Data(data=body)) or ()
        self.complete = not message.get("more_body", False)
        if self.complete:
            pieces += self._parser.send_with_data_passthrough(h11.EndOfMessage()) or ()
        if len(body) < BUFFER_BYTES:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            self._write(piece)
        if self.complete:
            self._news.set()
            self._on_answered()

    def _write(self, data: bytes | None) -> None:
        if data and not self._transport.is_closing():
            self._transport.write(data)
