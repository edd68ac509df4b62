"""Warm KV connections to one peer: opened early, lent one transfer at a time, FIFO when all are busy."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from workers.wire.connection import Connection
from workers.wire.deadlines import SHORT_LIFE_S, Path, Timer
from workers.wire.frames import FrameError, Kind, WireError
from workers.wire.kv_messages import KvReceived, KvRefused
from workers.wire.stream import ConnectionLost
from workers.wire.warming import NO_WARM_UP, WarmUp, pad, warm_up_for

log = logging.getLogger(__name__)


class PeerUnreachable(WireError):
    """No connection to the peer came up in time."""

    name = "peer_unreachable"


class KvChannel:
    """The dialer's end of a KV connection: carries one transfer at a time and hears the receiver's answers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lent = False
        self._answers: dict[str, asyncio.Future[KvReceived | KvRefused]] = {}

    async def listen(self) -> None:
        """Read answers until the connection ends; raises WireError then."""
        try:
            while True:
                answer, _ = await self.connection.receive(only=frozenset({Kind.CONTROL}))
                if not isinstance(answer, KvReceived | KvRefused):
                    raise FrameError(f"{self.connection.peer} sent {type(answer).__name__} on a KV connection")
                future = self._answers.get(answer.transfer)
                # an answer to a transfer that was aborted meanwhile has nobody to hear it
                if future is not None and not future.done():
                    future.set_result(answer)
        except WireError as error:
            self.connection.close(str(error))
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(ConnectionLost(f"{self.connection.peer}: {error}"))
            raise

    def expect(self, transfer: str) -> "asyncio.Future[KvReceived | KvRefused]":
        """The answer to come for `transfer`; pair with `forget`."""
        future: asyncio.Future[KvReceived | KvRefused] = asyncio.get_running_loop().create_future()
        if self.connection.close_reason is not None:
            future.set_exception(ConnectionLost(self.connection.close_reason))
        self._answers[transfer] = future
        return future

    def forget(self, transfer: str) -> None:
        future = self._answers.pop(transfer, None)
        if future is not None and future.done() and not future.cancelled():
            future.exception()  # retrieved: a broken connection was reported by the send already


class KvPool:
    """`size` connections to `peer`, kept up by one task each. A dead peer blocks only who asks for it."""

    def __init__(
        self,
        peer: str,
        size: int,
        path: Path,
        dial: Callable[[], Awaitable[Connection]],
        on_change: Callable[[], None] = lambda: None,
        *,
        warm: bool = False,
    ) -> None:
        self.peer = peer
        self.size = size
        self._path = path
        self._dial = dial
        self._idle: deque[KvChannel] = deque()
        self._waiters: deque[asyncio.Future[KvChannel]] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._error = "not tried yet"
        self._on_change = on_change
        self._warms = warm
        self._widest: KvChannel | None = None
        self.up = 0

    @property
    def keep_alive_s(self) -> float:
        """See `Path.keep_alive_s`."""
        return self._path.keep_alive_s

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_up(), name=f"kv to {self.peer}") for _ in range(self.size)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_waiters(ConnectionLost("this worker is stopping"))

    async def acquire(self) -> KvChannel:
        """The next free connection, first come first served; give it back with `release`.

        While the peer is up the wait has no limit of its own (transfers before this one take what they take; the
        request's deadline holds). Raises PeerUnreachable when none is up and none comes up in time.
        """
        channel = self.take_idle()
        if channel is not None:
            return channel
        future: asyncio.Future[KvChannel] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        timer = Timer(lambda: self._path.connect_s, partial(self._give_up, future), self._up_since)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):
                self._waiters.remove(future)

    def take_idle(self) -> KvChannel | None:
        """A free connection, if one is and nobody was here before: the last one used, whose TCP window is widest."""
        if not self._idle or self._waiters:
            return None
        channel = self._idle.pop()
        channel.lent = True
        return channel

    def release(self, channel: KvChannel) -> None:
        """Lend the connection to the longest waiter; a broken one is forgotten (its task dials anew)."""
        if channel.connection.close_reason is not None:
            return
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                channel.lent = True
                future.set_result(channel)
                return
        channel.lent = False
        self._idle.append(channel)

    def _up_since(self) -> object:
        """Another value each time, as long as the peer is up."""
        return object() if self.up else None

    def _give_up(self, future: "asyncio.Future[KvChannel]") -> None:
        if not future.done():
            future.set_exception(PeerUnreachable(f"{self.peer} is unreachable: {self._error}"))

    def _fail_waiters(self, error: WireError) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_exception(error)

    async def _keep_up(self) -> None:
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            await asyncio.sleep(self._path.retry_s(failures))
            failures += 1
            try:
                connection = await self._dial()
                since = clock()
                await self._lend(KvChannel(connection))
            except WireError as error:
                if str(error) != self._error:
                    log.warning("%s", error)
                self._error = str(error)
                continue
            except Exception as error:  # a bug costs this connection, not every later one
                log.exception("a KV connection to %s failed", self.peer)
                self._error = f"{type(error).__name__}: {error}"
                continue
            if clock() - since > SHORT_LIFE_S:
                failures = 0

    async def _lend(self, channel: KvChannel) -> None:
        self._count(+1)
        self.release(channel)
        warming = asyncio.create_task(self._warm(channel)) if self._warms else None
        try:
            await channel.listen()
        except WireError as error:
            self._error = str(error)
        finally:
            if warming is not None:
                warming.cancel()
            if channel is self._widest:
                self._widest = None
            channel.connection.close("no longer needed")
            self._count(-1)
            with contextlib.suppress(ValueError):
                self._idle.remove(channel)

    async def _warm(self, channel: KvChannel) -> None:
        """Open the window of a new connection while nobody wants it: see `warming`."""

        def plan() -> WarmUp:
            return warm_up_for(self._path, self.size) or NO_WARM_UP

        if plan() is NO_WARM_UP:
            return
        try:
            sent = await pad(channel.connection, plan, lambda: plan().share_bytes, lambda: channel.lent)
            if self._widest is not None or channel.lent:
                return
            self._widest = channel
            self._idle.remove(channel)
            self._idle.append(channel)
            await pad(channel.connection, plan, lambda: plan().whole_bytes - sent, lambda: channel.lent)
        except WireError:
            return  # whoever listens on the connection hears of it
        except Exception:  # it is as good as any other connection, only cold
            log.exception("a connection to %s was not warmed up", self.peer)

    def _count(self, change: int) -> None:
        self.up += change
        self._on_change()
