"""A non-blocking TCP socket that moves bytes straight between the kernel and caller-owned memory.

asyncio's streams copy through their own buffers, and its sock_* calls take one buffer a call and lose their place when
cancelled. Here a send is a list of views (one sendmsg), a receive fills views, and both can be *detached* from the
memory they use at any moment, because between two readiness events the kernel holds no reference to it: that is what
lets a cancelled request give its KV blocks back at once while the bytes already promised still cross.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterable
from functools import partial

from workers.wire.deadlines import DeadlineExceeded, Path, Timer
from workers.wire.frames import WireError

IOV_MAX = 512  # views per sendmsg; Linux takes 1024
MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)  # bytes/s; TCP paces itself, no qdisc is needed
MAX_SYN_RETRIES, MAX_KEEPALIVE_S, MAX_USER_TIMEOUT_MS = 127, 32_767, 2**31 - 1  # as the kernel has them
SYN_RETRY_CAP_S = 120  # TCP_RTO_MAX
ACKED = struct.Struct("=120xQQ")  # of struct tcp_info: tcpi_bytes_acked, tcpi_bytes_received (linux/tcp.h)
LITTLE_BYTES = 4096  # pings, their answers and statuses; more than that is something that a slow link takes a while for
SCRATCH = memoryview(bytearray(256 << 10))  # where bytes go that nobody wants any more: never read


class ConnectionLost(WireError):
    """The peer closed, reset or stopped answering."""

    name = "connection_lost"


class Batch:
    """Views on their way into the kernel, in order."""

    def __init__(self, views: Iterable[bytes | memoryview]) -> None:
        self._views = [memoryview(view) for view in views if len(view)]
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._views)

    def head(self) -> list[memoryview]:
        return self._views[self._next : self._next + IOV_MAX]

    def advance(self, sent_bytes: int) -> None:
        while sent_bytes:
            view = self._views[self._next]
            if sent_bytes < len(view):
                self._views[self._next] = view[sent_bytes:]
                return
            sent_bytes -= len(view)
            self._next += 1

    def detach(self) -> None:
        """Copy what is left to private memory: from now on the caller's memory is not touched."""
        self._views = [memoryview(bytes(view)) for view in self._views[self._next :]]
        self._next = 0


class Target:
    """The place of received bytes: one view after the other, or nowhere after `detach`."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = [view for view in views if len(view)]  # reading into nothing would look like the peer's end
        self._next = 0
        self._offset = 0
        self.size = sum(map(len, views))
        self.detached = False

    @classmethod
    def nowhere(cls, size: int) -> "Target":
        """For `size` bytes that nobody wants."""
        full, rest = divmod(size, len(SCRATCH))
        return cls([SCRATCH] * full + [SCRATCH[:rest]])

    def detach(self) -> None:
        """From now on the views are not touched; the remaining bytes are thrown away."""
        self.detached = True

    def buffers(self) -> list[memoryview]:
        """Memory for the next bytes, in order; empty when everything is there."""
        while self._next < len(self._views) and self._offset >= len(self._views[self._next]):
            self._offset -= len(self._views[self._next])
            self._next += 1
        views = self._views[self._next : self._next + IOV_MAX]
        if views and self._offset:
            views[0] = views[0][self._offset :]
        return _thrown_away(views) if self.detached else views

    def advance(self, received_bytes: int) -> None:
        self._offset += received_bytes


def _thrown_away(views: list[memoryview]) -> list[memoryview]:
    """As much of `SCRATCH` as one read may fill in place of `views`."""
    return [SCRATCH[: sum(map(len, views))]] if views else []


class Stream:
    """One connected socket. At most one sender and one receiver at a time."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        sock.setblocking(False)
        configure(sock, path)
        self._sock = sock
        self._fd = sock.fileno()
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._stall_s = path.stall_s  # as the socket knows it
        self._acked = self._received = self._taken = 0
        self._backlog = False
        self._bulk_read = 0
        self.in_bulk = False
        """Note that what is being read belongs to something longer than `LITTLE_BYTES`."""
        self.close_reason: str | None = None

    async def send(self, batch: Batch) -> None:
        """Hand everything to the kernel. Raises ConnectionLost, DeadlineExceeded (peer reads nothing)."""
        while batch:
            self._check_open()
            try:
                batch.advance(self._sock.sendmsg(batch.head()))
            except (BlockingIOError, InterruptedError):
                # the kernel says that there is room when a third of a buffer of megabytes is free: minutes, at times
                await self._ready(
                    self._loop.add_writer, self._loop.remove_writer, self.stall_s, self.unacknowledged_bytes
                )
            except OSError as error:
                raise self._lost(error) from None

    def stall_s(self) -> float:
        """For how long no byte may move, at this moment."""
        return self._path.stall_s

    async def read(self, target: Target, limit_s: Callable[[], float] | None = None) -> None:
        """Fill `target`. `limit_s`: of each pause between bytes; None waits for ever (an idle connection may)."""
        while buffers := target.buffers():
            self._check_open()
            try:
                received = self._sock.recvmsg_into(buffers)[0]
            except (BlockingIOError, InterruptedError):
                await self._ready(self._loop.add_reader, self._loop.remove_reader, limit_s)
                continue
            except OSError as error:
                raise self._lost(error) from None
            if received == 0:
                self.close("the peer closed the connection")
                self._check_open()
            target.advance(received)
            self._bulk_read += received * self.in_bulk

    async def read_bytes(self, size: int, limit_s: Callable[[], float] | None = None) -> memoryview:
        """Exactly `size` bytes; the caller has bounded `size`."""
        data = memoryview(bytearray(size))
        await self.read(Target([data]), limit_s)
        return data

    def moved(self) -> tuple[int, int]:
        """Bytes that say that the peer is there, and of these the ones of what a slow link takes a while for.

        Whatever the kernel has received, read or not, counts for the first. What the peer's kernel takes counts where
        much is waiting to be taken: a stopped process's kernel takes pings as well, until its buffers are full.
        """
        if self.close_reason is None:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED.size)
            if len(info) == ACKED.size:
                acked, self._received = ACKED.unpack(info)
                if self._backlog:
                    self._taken += acked - self._acked
                self._acked, self._backlog = acked, self.unacknowledged_bytes() > LITTLE_BYTES
        return self._received + self._taken, self._bulk_read + self._taken

    def unacknowledged_bytes(self) -> int:
        """Bytes that the kernel still holds because the peer's kernel has not acknowledged it; 0 when closed."""
        if self.close_reason is not None:
            return 0
        queued = fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0\0\0\0")
        return int.from_bytes(queued, sys.byteorder)

    def limit_unsent(self, size: int) -> None:
        """Let the kernel take that many bytes beyond what it may put on the network; 0: as its own default is."""
        if self.close_reason is None:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)

    def rebase(self, path: Path) -> None:
        """Derive deadlines from `path` from now on."""
        self._path = path
        self.follow()

    def follow(self) -> None:
        """Tell the kernel of the path's deadlines as they are now."""
        if self.close_reason is None:
            self._stall_s = self._path.stall_s
            configure(self._sock, self._path)

    @property
    def behind(self) -> bool:
        """The kernel still has other deadlines than the path."""
        return self._stall_s != self._path.stall_s

    def close(self, reason: str) -> None:
        """Close now; whoever waits on the stream gets ConnectionLost(reason)."""
        if self.close_reason is not None:
            return
        self.close_reason = reason
        for future in self._waiting:
            if not future.done():
                future.set_exception(ConnectionLost(reason))
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _check_open(self) -> None:
        if self.close_reason is not None:
            raise ConnectionLost(self.close_reason)

    def _lost(self, error: OSError) -> ConnectionLost:
        reason = error.strerror or str(error)
        self.close(reason)
        return ConnectionLost(reason)

    async def _ready(
        self,
        register: Callable[..., None],
        unregister: Callable[[int], bool],
        limit_s: Callable[[], float] | None,
        progress: Callable[[], object] | None = None,
    ) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        register(self._fd, _resolve, future)
        timer = None if limit_s is None else Timer(limit_s, partial(_expire, future, limit_s), progress)
        try:
            await future
        finally:
            self._waiting.discard(future)
            if timer is not None:
                timer.cancel()
            if self.close_reason is None:
                unregister(self._fd)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _expire(future: "asyncio.Future[None]", limit_s: Callable[[], float]) -> None:
    if not future.done():
        future.set_exception(DeadlineExceeded(f"no byte moved for {limit_s():.1f} s"))


def await_handshakes(sock: socket.socket, limit_s: float) -> None:
    """Let TCP's handshakes on a listening socket take `limit_s`: the kernel gives them up after 63 s otherwise."""
    waited_s, pause_s, retries = 1, 2, 1
    while waited_s < limit_s and retries < MAX_SYN_RETRIES:
        waited_s, pause_s, retries = waited_s + pause_s, min(2 * pause_s, SYN_RETRY_CAP_S), retries + 1
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, max(retries, 5))


def configure(sock: socket.socket, path: Path) -> None:
    """No Nagle delay; a peer that vanished without a word is noticed within the path's stall deadline."""
    stall_s = min(max(1, round(path.stall_s)), MAX_KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, stall_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, stall_s // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(round(path.stall_s * 1000), MAX_USER_TIMEOUT_MS))
    if path.connection_bps is not None:
        sock.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, path.connection_bps // 8)
