"""A real TCP proxy between two workers: holds back KV or control, goes dead with its connections open, or cuts them.

What is held is delivered later, in order: messages of the past, as a network delivers them when it comes back.
"""

import asyncio
import socket
from contextlib import suppress
from typing import Any, Literal

Channel = Literal["kv", "control"]
Direction = Literal["there", "back"]  # there: what the dialler sends

PIECE = 32 << 10
MOST = 256 << 10  # held back here for one connection; what is more stays with its sender


class _Line:
    """One connection through a way."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        self.channel: Channel | None = None
        self.waiting: dict[Direction, bytes] = {"there": b"", "back": b""}
        self.caught: set[Direction] = set()
        """Where what a hold waits for has come by."""

    def abort(self) -> None:
        for writer in (self.near, self.far):
            with suppress(Exception):
                writer.transport.abort()


class Way:
    """From one host to another. Every method is called on the loop that runs it."""

    def __init__(self) -> None:
        self._lines: set[_Line] = set()
        self._target = 0
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()
        self._held: dict[tuple[Channel, Direction], tuple[int, bytes]] = {}
        """Bytes that may still pass before the hold, and what it waits for."""
        self._frozen = False
        self._closed = False
        self.port = 0

    async def open(self) -> int:
        """Listen; returns the port."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        listener.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=PIECE)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    def aim(self, port: int) -> None:
        self._target = port

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    # -- faults and stages -------------------------------------------------------------------------------------

    def hold(self, channel: Channel, direction: Direction, after_bytes: int = 0, needle: bytes = b"") -> None:
        """Let so many more bytes pass, of all connections of a channel together, then nothing until `release`.

        With `needle` nothing is held before that comes by: pings still say that all is well.
        """
        self._held[channel, direction] = after_bytes, needle

    def holds(self, channel: Channel, direction: Direction, needle: bytes = b"") -> bool:
        """Whether something that contains `needle` waits here."""
        return any(
            line.channel == channel and line.waiting[direction] and needle in line.waiting[direction]
            for line in self._lines
        )

    def release(self) -> None:
        """Deliver what was held."""
        self._held.clear()
        for line in self._lines:
            line.caught.clear()
        self._tell()

    def freeze(self) -> None:
        """Half-open from now on: connections stay, new ones are taken, and nothing passes in either direction."""
        self._frozen = True

    def reset(self) -> None:
        """Reset every connection; what was held on it is lost."""
        for line in list(self._lines):
            line.abort()

    def cut(self) -> None:
        """Reset every connection, and every new one until `mend`."""
        self._closed = True
        self.reset()
        self._tell()

    def mend(self) -> None:
        """Everything passes again."""
        self._frozen = self._closed = False
        self.release()

    # -- inside ------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self._frozen and not self._closed:
            await self._changed.wait()
        if self._closed:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target, limit=PIECE)
        except OSError:
            writer.transport.abort()
            return
        line = _Line(writer, far_writer)
        self._lines.add(line)
        try:
            await asyncio.gather(
                self._pump(line, reader, far_writer, "there"), self._pump(line, far_reader, writer, "back")
            )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._lines.discard(line)
            line.abort()

    async def _pump(
        self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        reading: asyncio.Task[bytes] | None = None
        ended = False
        try:
            while not ended or line.waiting[direction]:
                blocked = bool(line.waiting[direction]) and self._blocked(line, direction)
                if line.waiting[direction] and not blocked:
                    data, line.waiting[direction] = line.waiting[direction], b""
                    self._pass(line, direction, len(data))
                    writer.write(data)
                    await writer.drain()
                    continue
                changed = asyncio.ensure_future(self._changed.wait())
                waited_for: set[asyncio.Future[Any]] = {changed}
                if not ended and len(line.waiting[direction]) < MOST:
                    reading = reading or asyncio.ensure_future(reader.read(PIECE))
                    waited_for.add(reading)
                await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if reading is not None and reading.done():
                    data, reading = reading.result(), None
                    ended = not data
                    if line.channel is None and direction == "there":
                        line.channel = "kv" if b"channel\xa2kv" in data else "control"
                    line.waiting[direction] += data
            while self._frozen and not self._closed:  # not even an end passes
                await self._changed.wait()
            writer.close()
        finally:
            if reading is not None:
                reading.cancel()

    def _blocked(self, line: _Line, direction: Direction) -> bool:
        if self._closed or self._frozen:
            return not self._closed
        left, needle = self._held.get((line.channel or "control", direction), (1, b""))
        if needle and needle in line.waiting[direction]:
            line.caught.add(direction)
        return left <= 0 and (not needle or direction in line.caught)

    def _pass(self, line: _Line, direction: Direction, size: int) -> None:
        key = (line.channel or "control", direction)
        if key in self._held:
            left, needle = self._held[key]
            self._held[key] = left - size, needle
