"""One authenticated connection: frames in, frames out, counted. Knows no roles and keeps no requests."""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.wire import frames, handshake
from workers.wire.codec import decode, encode, kind_of
from workers.wire.deadlines import SAME_DATACENTER, DeadlineExceeded, Path, within
from workers.wire.frames import Counters, Direction, FrameError, Header, Kind, WireError
from workers.wire.handshake import Facts, Hello, Proof, Refused, Welcome
from workers.wire.messages import Message
from workers.wire.stream import LITTLE_BYTES, MAX_SYN_RETRIES, Batch, ConnectionLost, Stream, Target

CHANNELS = ("control", "kv")


@dataclass(frozen=True)
class Local:
    """This worker as its connections see it."""

    facts: Facts
    secret: bytes
    counters: Counters = field(default_factory=Counters)


class Connection:
    """Frames over a stream. `send` may be called by many tasks (frames never interleave), `receive` by one."""

    def __init__(self, stream: Stream, path: Path, counters: Counters) -> None:
        self._stream = stream
        self._path = path
        self._counters = counters
        self._sending = asyncio.Lock()
        self._body_left = 0
        self._established = False
        self._uncounted: list[tuple[Direction, Kind, int]] = []
        self.peer = ""
        self.channel = ""

    async def send(self, message: Message, body: Sequence[memoryview] = ()) -> None:
        """Send one frame whose body is the concatenation of `body`, uncopied."""
        await self.send_batch(*self.batch(message, body))

    def batch(self, message: Message, body: Sequence[memoryview] = ()) -> tuple[Batch, Kind, int]:
        """A frame ready to send, its kind and size; keep the batch to detach it from the body's memory."""
        kind = kind_of(message)
        body_bytes = sum(len(view) for view in body)
        head = frames.pack(kind, encode(message), body_bytes)
        return Batch([head, *body]), kind, len(head) + body_bytes

    async def send_batch(self, batch: Batch, kind: Kind, frame_bytes: int) -> None:
        """Send what `batch` made."""
        async with self._sending:
            await self._send(batch)
        self._count("sent", kind, frame_bytes)

    async def send_all(self, messages: Sequence[Message]) -> None:
        """Send several body-less frames in one go."""
        packed = [(kind, frames.pack(kind, encode(m))) for m in messages for kind in (kind_of(m),)]
        async with self._sending:
            await self._send(Batch([data for _, data in packed]))
        for kind, data in packed:
            self._count("sent", kind, len(data))

    async def _send(self, batch: Batch) -> None:
        try:
            await self._stream.send(batch)
        except DeadlineExceeded as error:
            # a half-sent frame cannot be completed later: the connection is of no use any more
            self.close(str(error))
            raise
        except asyncio.CancelledError:
            if batch:
                self.close("cancelled in the middle of a frame")
            raise

    async def receive(self, *, idle_ok: bool = True, only: frozenset[Kind] | None = None) -> tuple[Message, Header]:
        """The next message. A KV frame's body must be read (`read_body`) before the next call.

        Raises FrameError (and closes: the stream has lost its place), ConnectionLost, DeadlineExceeded.
        """
        if self._body_left:
            raise RuntimeError(f"{self._body_left} bytes of the last frame's body were not read")
        stall_s = self._stream.stall_s
        self._stream.in_bulk = False
        try:
            raw = await self._stream.read_bytes(frames.HEADER.size, None if idle_ok else stall_s)
            header = frames.parse_header(raw)
            if only is not None and header.kind not in only:
                raise FrameError(f"{header.kind.name} frame on a {self.channel} connection of {self.peer}")
            self._stream.in_bulk = header.message_bytes + header.body_bytes > LITTLE_BYTES
            data = await self._stream.read_bytes(header.message_bytes, stall_s)
            header.verify(data)
            message = decode(header.kind, data)
        except WireError as error:
            if self._established:  # else accept or dial closes, after having said why
                self.close(str(error))
            raise
        self._body_left = header.body_bytes
        self._count("received", header.kind, frames.HEADER.size + header.message_bytes + header.body_bytes)
        return message, header

    async def read_body(self, target: Target) -> None:
        """Read the last frame's body to `target`, which must be of exactly its size."""
        if target.size != self._body_left:
            raise RuntimeError(f"a target of {target.size} bytes for a body of {self._body_left}")
        try:
            await self._stream.read(target, self._stream.stall_s)
        except WireError as error:
            self.close(str(error))
            raise
        self._body_left = 0

    @contextlib.contextmanager
    def little_unsent(self, size: int) -> Iterator[None]:
        """Let the kernel take at most `size` bytes ahead of what it may send: what follows waits for no more."""
        self._stream.limit_unsent(size)
        try:
            yield
        finally:
            self._stream.limit_unsent(0)

    async def drained(self, answer: "asyncio.Future[Any]") -> None:
        """Wait for the peer's answer to what was sent, as long as the kernel still gets rid of bytes towards it.

        A plain deadline would count the minutes that a full socket buffer takes on a slow link. Returns when `answer`
        is done; raises DeadlineExceeded, and closes, when neither bytes nor answer move for two reply deadlines: one
        for what the peer's kernel has taken, and the peer has still to read, and one for the answer.
        """

        def limit_s() -> float:
            return 2 * self._path.reply_s

        try:
            async with within(limit_s, self._stream.unacknowledged_bytes):
                await asyncio.wait([answer])
        except TimeoutError:
            left = self._stream.unacknowledged_bytes()
            reason = f"{self.peer} did not answer within {limit_s():.1f} s ({left} bytes on their way)"
            self.close(reason)
            raise DeadlineExceeded(reason) from None

    def moved(self) -> tuple[int, int]:
        """See `Stream.moved`."""
        return self._stream.moved()

    def follow(self) -> None:
        """The path may have other deadlines now: the kernel's are to be the same."""
        if self._stream.behind:
            self._stream.follow()

    def close(self, reason: str) -> None:
        """Close now; every waiter gets ConnectionLost(reason)."""
        self._stream.close(reason)

    @property
    def close_reason(self) -> str | None:
        return self._stream.close_reason

    def _count(self, direction: Direction, kind: Kind, frame_bytes: int) -> None:
        if self.peer:
            self._counters.add(self.peer, direction, kind, frame_bytes)
        else:  # a listener learns the name at the end of the handshake; strangers leave no trace in the counters
            self._uncounted.append((direction, kind, frame_bytes))

    def establish(self, path: Path, peer: str, channel: str) -> None:
        """The handshake is done, and a listener knows who dialled: from now on that path's deadlines hold."""
        self._established = True
        self._path, self.peer, self.channel = path, peer, channel
        self._stream.rebase(path)
        for entry in self._uncounted:
            self._count(*entry)

    # -- handshake ---------------------------------------------------------------------------------------------

    async def _introduce(self, local: Local, channel: str) -> Facts:
        hello = Hello(facts=local.facts, channel=channel, nonce=secrets.token_bytes(32))
        await self.send(hello)
        welcome, _ = await self.receive(idle_ok=False, only=frozenset({Kind.HANDSHAKE}))
        if isinstance(welcome, Refused):
            raise handshake.Incompatible(f"{self.peer} refused the connection: {welcome.reason}")
        if not isinstance(welcome, Welcome):
            raise FrameError(f"{self.peer} answered a hello with {type(welcome).__name__}")
        expected = handshake.listener_proof(local.secret, hello, welcome.facts, welcome.nonce)
        handshake.check_proof(expected, welcome.proof, self.peer)
        handshake.check_facts(local.facts, welcome.facts)
        await self.send(Proof(proof=handshake.dialer_proof(local.secret, hello, welcome.facts, welcome.nonce)))
        return welcome.facts

    async def _admit(self, local: Local) -> tuple[Facts, str]:
        handshakes = frozenset({Kind.HANDSHAKE})
        hello, _ = await self.receive(idle_ok=False, only=handshakes)
        if not isinstance(hello, Hello):
            raise FrameError(f"a connection opened with {type(hello).__name__} instead of Hello")
        nonce = secrets.token_bytes(32)
        proof = handshake.listener_proof(local.secret, hello, local.facts, nonce)
        await self.send(Welcome(facts=local.facts, nonce=nonce, proof=proof))
        answer, _ = await self.receive(idle_ok=False, only=handshakes)
        if isinstance(answer, Refused):
            raise ConnectionLost(f"{hello.facts.name} refused this worker: {answer.reason}")
        if not isinstance(answer, Proof):
            raise FrameError(f"a welcome was answered with {type(answer).__name__}")
        expected = handshake.dialer_proof(local.secret, hello, local.facts, nonce)
        handshake.check_proof(expected, answer.proof, f"the dialer that calls itself {hello.facts.name}")
        handshake.check_facts(local.facts, hello.facts)
        if hello.channel not in CHANNELS:
            raise FrameError(f"unknown channel {hello.channel!r}; this worker knows {', '.join(CHANNELS)}")
        return hello.facts, hello.channel


async def dial(address: str, port: int, peer: str, channel: str, local: Local, path: Path) -> Connection:
    """Connect to `peer` and agree. Raises WireError, with the peer's name and address in its sentence."""
    where = f"{peer} at {address}:{port}"
    path = path.of_channel(channel)
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:  # out of file descriptors: perhaps not the next time
        raise ConnectionLost(f"cannot connect to {where}: {error.strerror}") from None
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, MAX_SYN_RETRIES)  # until our own deadline, which moves
    connection: Connection | None = None
    try:
        async with within(lambda: path.connect_s):
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
            connection = Connection(Stream(sock, path), path, local.counters)
            connection.peer, connection.channel = peer, channel
            facts = await connection._introduce(local, channel)
        if facts.name != peer:
            raise handshake.Incompatible(f"{where} is in fact {facts.name}; check PDDBED_PEERS")
        connection.establish(path, peer, channel)
    except BaseException as error:
        if connection is None:
            sock.close()
        else:
            if isinstance(error, handshake.Incompatible):
                with contextlib.suppress(WireError):
                    await connection.send(Refused(reason=str(error)[:4000]))
            connection.close(f"handshake failed: {error}")
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"{where} did not finish the handshake within {path.connect_s:.1f} s") from None
        if isinstance(error, OSError):
            # asyncio replaces the system's words by its own ("Connect call failed")
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConnectionLost(f"cannot connect to {where}: {reason}") from None
        if isinstance(error, FrameError | ConnectionLost | DeadlineExceeded):
            raise type(error)(f"handshake with {where}: {error}") from None
        raise
    return connection


async def accept(
    sock: socket.socket, local: Local, path_of: Callable[[str], Path | None], stranger: Path = SAME_DATACENTER
) -> Connection:
    """Answer a dialer. `path_of` gives the path to a peer by its name, None for a name this worker does not know.

    `stranger`: the path that holds until the dialer has said its name. Raises WireError after telling the peer why; the
    socket is closed then.
    """
    connection = Connection(Stream(sock, stranger), stranger, local.counters)
    try:
        # the dialer's own deadline is the shorter one
        async with within(lambda: _accept_s(stranger)):
            facts, channel = await connection._admit(local)
            path = path_of(facts.name)
            if path is None:
                raise handshake.Incompatible(f"{facts.name} is not among the peers of {local.facts.name}")
            path = path.of_channel(channel)
    except (WireError, TimeoutError) as error:
        # also after a frame of another protocol version: ours tells the dialer's parser both versions
        if not isinstance(error, ConnectionLost):
            with contextlib.suppress(WireError):
                await connection.send(Refused(reason=str(error)[:4000] or "handshake took too long"))
        connection.close(f"handshake failed: {error}")
        if isinstance(error, TimeoutError):
            limit_s = _accept_s(stranger)
            raise DeadlineExceeded(f"a dialer did not finish the handshake within {limit_s:.0f} s") from None
        raise
    except BaseException:
        connection.close("handshake cancelled")
        raise
    connection.establish(path, facts.name, channel)
    return connection


def _accept_s(path: Path) -> float:
    return max(60.0, 2 * path.connect_s)
