"""A TCP proxy in front of a port: real connections that a test limits, delays, pauses, spoils, cuts or records."""

import asyncio
import socket
import time
from contextlib import suppress
from typing import Self


class _Carried:
    """One connection: its two ends here, and what has gone through it in each direction."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        self.there, self.back = bytearray(), bytearray()

    @property
    def dialler_port(self) -> int:
        port: int = self.near.get_extra_info("peername")[1]
        return port

    def abort(self) -> None:
        for writer in (self.near, self.far):
            with suppress(Exception):
                writer.transport.abort()


class Proxy:
    """Carries connections to `target_port`, each byte `one_way_s` later.

    `rate_bytes_per_s` and `pause` act on what the dialler sends; `spoil_at` flips one bit of that byte (counted over
    the connection) on every connection made after it was set. `back_bytes_per_s` acts on what it is answered, `held` on
    what the dialler of that port sends. With `record`, `recorded` has what went through each connection, there and
    back.
    """

    def __init__(
        self, target_port: int = 0, buffer_bytes: int = 128 << 10, one_way_s: float = 0.0, record: bool = False
    ) -> None:
        """`buffer_bytes`: what waits in the proxy itself, which the sender takes for arrived."""
        self._target_port = target_port
        self._buffer_bytes = buffer_bytes
        self.one_way_s = one_way_s
        self._record = record
        self._open: list[_Carried] = []
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._both_ways = False
        self.recorded: list[tuple[bytearray, bytearray]] = []
        self.rate_bytes_per_s: float | None = None
        self.back_bytes_per_s: float | None = None
        self.held: int | None = None
        self.spoil_at: int | None = None
        self.port = 0
        self.forwarded = 0

    async def __aenter__(self) -> Self:
        # a small receive buffer, so that what the proxy holds back stays visible to the sender
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=min(16 << 10, self._buffer_bytes))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._flowing.set()
        self._server.close()
        self.cut()

    def aim(self, port: int) -> None:
        self._target_port = port

    def pause(self, both_ways: bool = False) -> None:
        """Hold what the dialler sends, until `resume`; with `both_ways` also what it is answered, an end among it."""
        self._both_ways = both_ways
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self, dialler_port: int | None = None) -> None:
        """Reset every connection, or the one that was dialled from a port."""
        for carried in list(self._open):
            if dialler_port in (None, carried.dialler_port):
                self._open.remove(carried)
                carried.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        carried = _Carried(writer, far_writer)
        self._open.append(carried)
        if self._record:
            self.recorded.append((carried.there, carried.back))
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(
                self._pump(carried, reader, far_writer, there=True),
                self._pump(carried, far_reader, writer, there=False),
            )

    async def _pump(
        self, carried: _Carried, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, there: bool
    ) -> None:
        passed = 0
        due = time.monotonic()
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = asyncio.create_task(self._arrive(way, writer))
        try:
            while data := await reader.read(16 << 10):
                rate = self.rate_bytes_per_s if there else self.back_bytes_per_s
                if there:
                    await self._flowing.wait()
                    while self.held is not None and self.held == carried.dialler_port:
                        await asyncio.sleep(0.01)
                if rate is not None:
                    due = max(due, time.monotonic()) + len(data) / rate
                    await asyncio.sleep(due - time.monotonic())
                if there:
                    if self.spoil_at is not None and passed <= self.spoil_at < passed + len(data):
                        spoilt = bytearray(data)
                        spoilt[self.spoil_at - passed] ^= 1
                        data = bytes(spoilt)
                    self.forwarded += len(data)
                passed += len(data)
                if self._record:
                    (carried.there if there else carried.back).extend(data)
                if self._both_ways:
                    await self._flowing.wait()
                if self.one_way_s:
                    way.put_nowait((time.monotonic() + self.one_way_s, data))
                else:
                    writer.write(data)
                    await writer.drain()
            if self._both_ways:
                await self._flowing.wait()
            way.put_nowait((time.monotonic() + self.one_way_s, b""))
            await arriving
        finally:
            arriving.cancel()

    async def _arrive(self, way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await way.get()
            await asyncio.sleep(due - time.monotonic())
            if not data:
                writer.close()
                return
            writer.write(data)
