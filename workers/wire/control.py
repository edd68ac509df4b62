"""The control connection between two workers: ordered messages both ways, and whether the peer still lives."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from workers.wire.connection import Connection
from workers.wire.deadlines import DeadlineExceeded, Path
from workers.wire.frames import Kind, WireError
from workers.wire.messages import Message, Ping, Pong, Status
from workers.wire.stream import ConnectionLost

log = logging.getLogger(__name__)

CONTROL_KINDS = frozenset({Kind.CONTROL, Kind.TOKEN_IDS})
TURN_NS = 20_000_000  # of handling messages, before others on this loop have their turn
MAX_WAITING = 100_000  # messages; a peer that takes none of them is as good as gone


class ControlLink:
    """Lives as long as its connection. KV never travels here, so token ids wait for nothing but the network."""

    def __init__(
        self,
        connection: Connection,
        path: Path,
        on_message: Callable[[str, Message], None],
        status: Callable[[str], Status | None],
        moved: Callable[[str], int],
        *,
        pings: bool,
    ) -> None:
        """`moved`: bytes from and to the peer, on all its connections, that say that it is there."""
        self.peer = connection.peer
        self.rtt_ns: int | None = None
        self.peer_status: Status | None = None
        self._connection = connection
        self._path = path
        self._on_message = on_message
        self._status = status
        self._moved = moved
        self._pings = pings
        self._outgoing: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._heard_ns = time.monotonic_ns()

    def post(self, message: Message) -> None:
        """Send as soon as possible, after everything posted before. Raises ConnectionLost on a dead link."""
        if self._connection.close_reason is not None:
            raise ConnectionLost(f"{self.peer}: {self._connection.close_reason}")
        self._outgoing.append(message)
        self._wake.set()
        if len(self._outgoing) > MAX_WAITING:
            self.close(f"{self.peer} takes no messages: {MAX_WAITING} are waiting")

    def close(self, reason: str) -> None:
        self._connection.close(reason)

    async def run(self) -> str:
        """Read, write and watch until the link ends; returns why."""
        tasks = [asyncio.create_task(part()) for part in (self._read, self._write, self._watch)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            # the first cause closes the connection, and with it whatever the others wait for
            error = next(error for task in done if (error := task.exception()) is not None)
            self._connection.close(str(error))
            if not isinstance(error, WireError):  # a bug in a handler costs this link, not the worker
                log.error("control link to %s failed", self.peer, exc_info=error)
            return self._connection.close_reason or str(error)
        finally:
            self._connection.close("link ended")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        began_ns = time.monotonic_ns()
        while True:
            message, _ = await self._connection.receive(only=CONTROL_KINDS)
            self._heard_ns = time.monotonic_ns()
            if self._heard_ns - began_ns > TURN_NS:  # many messages that are here already do not wait for anything
                await asyncio.sleep(0)
                began_ns = time.monotonic_ns()
            if isinstance(message, Ping):
                self.post(Pong(sent_ns=message.sent_ns))
                status = self._status(self.peer)
                if status is not None:
                    self.post(status)
            elif isinstance(message, Pong):
                self.rtt_ns = self._heard_ns - message.sent_ns
            else:
                if isinstance(message, Status):
                    self.peer_status = message
                self._on_message(self.peer, message)

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outgoing:
                messages = list(self._outgoing)
                self._outgoing.clear()
                await self._connection.send_all(messages)

    async def _watch(self) -> None:
        seen = self._moved(self.peer)
        while True:
            if self._pings:
                self.post(Ping(sent_ns=time.monotonic_ns()))
            heard_ns = self._heard_ns
            await asyncio.sleep(self._path.ping_every_s)
            seen, seen_before = self._moved(self.peer), seen
            if seen != seen_before and self._heard_ns == heard_ns:  # no whole message, but parts of one
                self._heard_ns = time.monotonic_ns()
            silent_s = (time.monotonic_ns() - self._heard_ns) / 1e9
            if silent_s > self._path.stall_s:
                raise DeadlineExceeded(f"{self.peer} has been silent for {silent_s:.1f} s")
