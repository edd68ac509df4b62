"""What a fuzzer feeds, and what must hold whatever it is: each target takes bytes and raises when a property fails.

Real sockets, real connections, the real receiving code; only the memory behind it is plain. No target may take longer
than a moment, write where it should not, or keep more than a frame's limit allows.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import xxhash

from tests.workers.fuzz.scripts import BLOCK_SIZE, to_stream
from workers.wire import connection as wire_connection
from workers.wire.codec import decode, encode, kind_of
from workers.wire.connection import Connection, Local
from workers.wire.control import CONTROL_KINDS
from workers.wire.deadlines import Path
from workers.wire.dissect import Dissector, Piece, request_of
from workers.wire.frames import HEADER, PROTOCOL_VERSION, FrameError, WireError, parse_header
from workers.wire.handshake import Facts
from workers.wire.kv_encoding import Fp8
from workers.wire.kv_messages import KvBegin, KvTail
from workers.wire.kv_receive import RefuseTransfer, receive_transfers
from workers.wire.kv_tail import receive_tails
from workers.wire.stream import Stream, Target

BYTES_PER_TOKEN = 2048  # of the built-in model, as in the seeds
MOST_BLOCKS = 64
HANG_S = 5.0
MOST_INPUT = 1 << 17  # what loopback takes while nobody reads


def messages(script: bytes) -> None:
    """A frame's header and message are parsed to something that says the same when it is sent again, or refused."""
    stream = to_stream(script)
    with suppress(FrameError):
        while len(stream) >= HEADER.size:
            header = parse_header(stream[: HEADER.size])
            raw = stream[HEADER.size : HEADER.size + header.message_bytes]
            header.verify(raw)
            message = decode(header.kind, raw)
            again = decode(kind_of(message), encode(message))
            assert encode(again) == encode(message)  # not the messages: not-a-number differs from itself
            request_of(message)
            stream = stream[HEADER.size + header.message_bytes + header.body_bytes :]


def dissect(data: bytes) -> None:
    """Every byte of a captured stream belongs to exactly one piece, wherever it is cut and whatever was missed."""
    plan, stream = data[:8], data[8:]
    dissector = Dissector(at_start=bool(plan[:1] and plan[0] & 1))
    sizes = [1 + size for size in plan[1:]] or [1]
    at = turn = total = 0
    pieces: list[Piece] = []
    while at < len(stream):
        size = sizes[turn % len(sizes)] * (1 + turn % 40)
        part = stream[at : at + size]
        if turn and plan[0] & 2 and turn % 5 == 0:
            pieces += dissector.skip(turn, len(part))
        else:
            pieces += dissector.feed(turn, part)
        total += len(part)
        at += size
        turn += 1
    pieces += dissector.end()
    assert sum(piece.size for piece in pieces) == total
    assert all(piece.size > 0 for piece in pieces)


class _Sink:
    """One arriving transfer; complains when it is told nonsense."""

    def __init__(self, memory: bytearray, begin: KvBegin) -> None:
        self.memory, self.begin = memory, begin
        self.cancelled = begin.spec.deadline_s > 1e5  # for the fuzzer to choose
        self.ended = ""
        self.expected = -(-begin.tokens // BLOCK_SIZE) - begin.first_block
        self.arrived = 0

    def views(self, first_block: int, tokens: list[int]) -> list[memoryview]:
        assert self.begin.first_block <= first_block, "blocks that the receiver has already"
        assert first_block + len(tokens) <= MOST_BLOCKS
        size = BLOCK_SIZE * BYTES_PER_TOKEN
        return [
            memoryview(self.memory)[(first_block + i) * size :][: count * BYTES_PER_TOKEN]
            for i, count in enumerate(tokens)
        ]

    def attach(self, target: Target | None) -> None:
        assert not self.ended or target is None

    def verified(self, blocks: int) -> None:
        self.arrived += blocks

    def complete(self, *_: Any) -> None:
        assert not self.ended, f"complete after {self.ended}"
        assert self.arrived == self.expected, "complete without all blocks"
        self.ended = "complete"

    def failed(self, error: str, reason: str) -> None:
        assert not self.ended, f"failed after {self.ended}"
        self.ended = error


_ENCODINGS = {"fp8": Fp8((4, 2, 2, 32), torch.float32)}


class _Receiver:
    block_size = BLOCK_SIZE
    bytes_per_token = BYTES_PER_TOKEN

    def __init__(self) -> None:
        self.memory = bytearray(MOST_BLOCKS * BLOCK_SIZE * BYTES_PER_TOKEN)
        self.sinks: list[_Sink] = []
        self.tails = 0

    def begin(self, begin: KvBegin) -> Any:
        if begin.tokens > MOST_BLOCKS * BLOCK_SIZE:
            raise RefuseTransfer("out_of_kv_blocks", "too long")
        self.sinks.append(_Sink(self.memory, begin))
        return self.sinks[-1]

    def take_tail(self, peer: str, tail: KvTail, kv: memoryview) -> str | None:
        assert len(kv) == tail.tokens * BYTES_PER_TOKEN
        assert xxhash.xxh3_64_intdigest(kv) == tail.checksum
        self.tails += 1
        return None if tail.position % 2 else "not wanted"


class Wire:
    """One event loop and one listening socket for all inputs of a run."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._facts = Facts(
            name="md0",
            role="main-decode",
            protocol=PROTOCOL_VERSION,
            model="tiny",
            fingerprint="f" * 32,
            block_size=BLOCK_SIZE,
            kv_shape=[4, 2, 2, 32],
            kv_dtype="float32",
        )

    def close(self) -> None:
        self._listener.close()
        self._runner.close()

    def transfers(self, script: bytes) -> _Receiver:
        """An authenticated prefill's KV connection carries anything: it ends by name, each transfer exactly once."""
        receiver = _Receiver()

        async def serve(sock: socket.socket) -> None:
            await receive_transfers(self._authenticated(sock, "kv"), receiver, _ENCODINGS)

        self._expect_wire_error(serve, to_stream(script))
        assert all(sink.ended for sink in receiver.sinks if not sink.cancelled), "a transfer was forgotten"
        return receiver

    def tails(self, script: bytes) -> _Receiver:
        """The same of a relay's."""
        receiver = _Receiver()

        async def serve(sock: socket.socket) -> None:
            await receive_tails(self._authenticated(sock, "kv"), receiver)

        self._expect_wire_error(serve, to_stream(script))
        return receiver

    def control(self, script: bytes) -> int:
        """A control connection's messages are read to the first one that breaks a rule; how many there were."""
        read = 0

        async def serve(sock: socket.socket) -> None:
            nonlocal read
            connection = self._authenticated(sock, "control")
            while True:
                await connection.receive(only=CONTROL_KINDS)
                read += 1

        self._expect_wire_error(serve, to_stream(script))
        return read

    def handshake(self, data: bytes) -> None:
        """A stranger may say what he likes: without the secret nobody gets in."""

        async def serve(sock: socket.socket) -> None:
            await wire_connection.accept(sock, Local(self._facts, bytes(32)), lambda name: Path())
            raise AssertionError("let in without the secret")

        self._expect_wire_error(serve, data)

    def handshake_script(self, script: bytes) -> None:
        """The same, with frames whose checksums are right."""
        self.handshake(to_stream(script))

    def _authenticated(self, sock: socket.socket, channel: str) -> Connection:
        connection = Connection(Stream(sock, Path()), Path(), Local(self._facts, bytes(32)).counters)
        connection.establish(Path(), "p0", channel)
        return connection

    def _expect_wire_error(self, serve: Any, data: bytes) -> None:
        async def limited(sock: socket.socket) -> None:
            async with asyncio.timeout(HANG_S):
                await serve(sock)

        with self._connection(data[:MOST_INPUT]) as sock:
            try:
                self._runner.run(limited(sock))
            except WireError:
                return
            finally:
                sock.close()
        raise AssertionError("it went on after the peer's end")

    @contextmanager
    def _connection(self, data: bytes) -> Iterator[socket.socket]:
        """The listener's end of a connection on which `data` was sent and no more will be."""
        with socket.socket() as dialer:
            dialer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MOST_INPUT)
            dialer.connect(self._listener.getsockname())
            sock, _ = self._listener.accept()
            dialer.sendall(data)
            dialer.shutdown(socket.SHUT_WR)
            yield sock
