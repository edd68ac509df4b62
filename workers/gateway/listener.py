"""The API's open connections: accepted up to a limit, the idle ones closed for new ones, and all of them at the end."""

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from workers.gateway.connection import Connection
from workers.gateway.limits import ApiLimits

log = logging.getLogger(__name__)

SPARE_FILES = 64  # beside the connections and what is open at the start: workers, records, and whoever reconnects
MOST_FILES = 1 << 16
RESERVE = 16  # connections fewer than there turned out to be descriptors for
AT_ONCE = 64  # connections accepted before others have their turn
RETRY_S = 0.02  # after there was no descriptor for a connection: those of closed ones are free by then
SHORT_S = 60.0  # how long fewer connections are held after that
GRACE_S = 2.0  # for answers to be read at the end
SELDOM_S = 60.0
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"
    b'{"error": {"message": "every connection of this gateway is busy; try again later", "type": "server_error", '
    b'"param": null, "code": "overloaded"}}'
)


class Listener:
    """Serves `app` on one listening socket."""

    def __init__(self, app: ASGIApp, limits: ApiLimits) -> None:
        self._app = app
        self._limits = limits
        self._open: dict[Connection, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._said: dict[str, tuple[float, int]] = {}
        self._socket: socket.socket | None = None
        self._most = limits.connections
        self._short = False

    def start(self, listener: socket.socket) -> None:
        """Accept connections from now on."""
        listener.setblocking(False)
        self._socket = listener
        self._loop = asyncio.get_running_loop()
        self._most = min(self._limits.connections, _files_left())
        self._loop.add_reader(listener, self._accept)

    async def close(self) -> None:
        """Accept no more; close connections when their answers have been read, and at the latest after GRACE_S."""
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        for connection in list(self._open):
            connection.end()
        end = time.monotonic() + GRACE_S
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for connection in list(self._open):
            connection.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- called by connections ---------------------------------------------------------------------------------

    def run(self, exchange: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(exchange)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def lost(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def seldom(self, what: str, message: str, *arguments: object) -> None:
        """Log what a client can bring about as often as it likes: once a minute, with a count."""
        now = time.monotonic()
        said_at, unsaid = self._said.get(what, (-SELDOM_S, 0))
        if now - said_at < SELDOM_S:
            self._said[what] = said_at, unsaid + 1
            return
        self._said[what] = now, 0
        log.warning(message + (f" ({unsaid} more since the last such line)" if unsaid else ""), *arguments)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request broke off", exc_info=error)

    # -- accepting ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(AT_ONCE):
            if len(self._open) >= self._most:
                self._make_room()
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor, no memory: other connections have to end first
                self.seldom("accept", "a client could not be accepted: %s", os.strerror(error.errno or 0))
                self._run_short()
                self._loop.remove_reader(self._socket)
                self._loop.call_later(RETRY_S, self._go_on)
                return
            if len(self._open) >= self._most:
                self.seldom("busy", "a client was turned away: %d connections are busy", len(self._open))
                with accepted, suppress(OSError):
                    accepted.send(BUSY)
                continue
            connection = Connection(self._app, self._limits, self)
            self._open[connection] = None
            self._loop.create_task(self._take(accepted, connection))

    def _run_short(self) -> None:
        """Hold fewer connections than there were descriptors for, so that the next one need not wait for one."""
        self._most = max(8, min(self._most, len(self._open) - RESERVE))
        for _ in range(max(1, len(self._open) - self._most)):
            self._make_room()
        if not self._short:
            self._short = True
            self._loop.call_later(SHORT_S, self._recover)

    def _recover(self) -> None:
        self._short = False
        if self._socket is not None:
            self._most = min(self._limits.connections, _files_left() + len(self._open))

    def _go_on(self) -> None:
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._accept)

    async def _take(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # it has gone already
            self.lost(connection)
            accepted.close()

    def _make_room(self) -> None:
        """Close the connection that has waited for its client for longest."""
        idle = [connection for connection in self._open if connection.idle]
        if idle:
            victim = min(idle, key=lambda connection: connection.heard_at)
            self.seldom("room", "an idle client was let go for a new one: %d connections are open", len(self._open))
            self.lost(victim)
            victim.transport.abort()


def _files_left() -> int:
    """Number of connections that this process may hold: its limit of open files is raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    taken = sum(1 for _ in Path("/proc/self/fd").iterdir())
    left = (most if soft == resource.RLIM_INFINITY else soft) - taken
    return max(8, left - SPARE_FILES if left > 2 * SPARE_FILES else left // 2)
