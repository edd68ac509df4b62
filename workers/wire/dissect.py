"""Our frames in bytes that were captured rather than received: classes, sizes and requests. Pure, offline, for audits.

Unlike `connection`, it starts anywhere in a stream and lives with bytes whose content was not captured: inside a
body or message they are counted by the frame around them; where a header is missing it looks for the next frame
that proves itself by its checksum, and what lies between is `unknown`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from workers.wire.codec import decode
from workers.wire.frames import COUNTED_AS, HEADER, MAGIC, FrameError, Header, parse_header
from workers.wire.kv_messages import KvAbort, KvBegin, KvBlocks, KvEnd, KvReceived, KvRefused, KvTail, KvWanted
from workers.wire.messages import (
    Cancel,
    Failed,
    Finish,
    HandOver,
    Message,
    Prefill,
    Report,
    StopRelay,
    TokenIds,
    Tokens,
)

UNKNOWN = "unknown"
_OF_TRANSFER = KvBlocks | KvEnd | KvAbort | KvReceived | KvRefused
_OF_REQUEST = TokenIds | Tokens | HandOver | StopRelay | KvTail | KvWanted | Report | Cancel | Finish | Failed


@dataclass(frozen=True, slots=True)
class Piece:
    """A frame, or a run of bytes that belong to no known frame (`traffic` is "unknown").

    `time_ns` is that of its first byte; `size` counts header, message and body. `size` of a frame that was cut off
    by the end of the capture is what was seen of its `frame_size`. `message` is None where it was not captured.
    """

    time_ns: int
    traffic: str
    size: int
    body_bytes: int = 0
    message: Message | None = None
    frame_size: int = 0  # 0: not known
    is_head: bool = False  # unknown only because the capture began inside a frame


class Dissector:
    """One direction of one connection. `at_start`: the first byte fed is the connection's first."""

    def __init__(self, *, at_start: bool = False) -> None:
        self._buffer = bytearray()  # header and message under way, or what is being searched for a header
        self._buffer_ns = 0
        self._in_step = at_start
        self._in_head = not at_start
        self._header: Header | None = None
        self._message: Message | None = None
        self._frame_ns = 0
        self._message_left = 0  # of a message that was not captured whole
        self._body_left = 0

    def feed(self, time_ns: int, data: bytes | memoryview) -> Iterator[Piece]:
        """Consecutive bytes. Yields what they complete."""
        view = memoryview(data)
        while view:
            used = self._consume(len(view))
            if used:
                view = view[used:]
                if done := self._done():
                    yield done
                continue
            if not self._buffer:
                self._buffer_ns = time_ns
            self._buffer += view
            yield from self._parse(time_ns)
            return

    def skip(self, time_ns: int, count: int) -> Iterator[Piece]:
        """Consecutive bytes whose content is not known."""
        while count:
            used = self._consume(count)
            if used:
                count -= used
                if done := self._done():
                    yield done
                continue
            if self._in_step and len(self._buffer) >= HEADER.size:
                # the header was there, some of its message was not: the frame's end is known all the same
                header = self._peek()
                self._message_left = header.message_bytes - (len(self._buffer) - HEADER.size)
                self._buffer.clear()
                self._begin(header, None)
                continue
            self._in_head = False
            yield Piece(self._buffer_ns if self._buffer else time_ns, UNKNOWN, len(self._buffer) + count)
            self._buffer.clear()
            self._in_step = False
            return

    def end(self) -> Iterator[Piece]:
        """The frames that were under way when the capture ended."""
        if self._header is not None:
            seen = _frame_bytes(self._header) - self._message_left - self._body_left
            body = self._header.body_bytes - self._body_left
            kind = self._header.kind
            yield Piece(self._frame_ns, COUNTED_AS[kind], seen, body, self._message, _frame_bytes(self._header))
        elif self._in_step and len(self._buffer) >= HEADER.size:
            header = self._peek()
            size = len(self._buffer)
            yield Piece(self._buffer_ns, COUNTED_AS[header.kind], size, frame_size=_frame_bytes(header))
        elif self._buffer:
            yield Piece(self._buffer_ns, UNKNOWN, len(self._buffer), is_head=self._in_head)
        self._buffer.clear()
        self._header = None

    # -- inside a frame whose header is known ------------------------------------------------------------------

    def _begin(self, header: Header, message: Message | None) -> None:
        self._header, self._message = header, message
        self._frame_ns = self._buffer_ns
        self._body_left = header.body_bytes

    def _consume(self, available: int) -> int:
        """Take bytes that need no look: the rest of a lost message, and the body. 0: not in such a place."""
        if self._header is None:
            return 0
        message = min(available, self._message_left)
        body = min(available - message, self._body_left)
        self._message_left -= message
        self._body_left -= body
        return message + body

    def _done(self) -> Piece | None:
        header = self._header
        if header is None or self._message_left or self._body_left:
            return None
        self._header = None
        size = _frame_bytes(header)
        return Piece(self._frame_ns, COUNTED_AS[header.kind], size, header.body_bytes, self._message, size)

    # -- looking at bytes --------------------------------------------------------------------------------------

    def _parse(self, time_ns: int) -> Iterator[Piece]:
        """Take whole headers and messages from the buffer, and bodies as far as they are there."""
        while self._buffer:
            if not self._in_step:
                yield from self._search(time_ns)
                if not self._in_step:
                    return
            if len(self._buffer) < HEADER.size:
                return
            try:
                header = self._peek()
                head_bytes = HEADER.size + header.message_bytes
                if len(self._buffer) < head_bytes:
                    return
                message = decode(header.kind, self._verified(header))
            except FrameError:
                self._in_step = False
                yield self._lose(1, time_ns)  # never look at this header again
                continue
            del self._buffer[:head_bytes]
            self._begin(header, message)
            del self._buffer[: self._consume(len(self._buffer))]
            self._buffer_ns = time_ns
            if (done := self._done()) is None:
                return
            yield done

    def _peek(self) -> Header:
        """The header at the beginning of the buffer. Raises FrameError."""
        return parse_header(bytes(self._buffer[: HEADER.size]))

    def _verified(self, header: Header) -> bytes:
        message = bytes(self._buffer[HEADER.size : HEADER.size + header.message_bytes])
        header.verify(message)
        return message

    def _search(self, time_ns: int) -> Iterator[Piece]:
        """Drop bytes up to the next frame that proves itself; in step afterwards, or out of bytes to decide."""
        while True:
            at = self._buffer.find(MAGIC)
            if at < 0:
                # the beginning of the magic may be the end of the buffer
                if len(self._buffer) >= len(MAGIC):
                    yield self._lose(len(self._buffer) - len(MAGIC) + 1, time_ns)
                return
            if at:
                yield self._lose(at, time_ns)
            if len(self._buffer) < HEADER.size:
                return
            try:
                header = self._peek()
                if len(self._buffer) < HEADER.size + header.message_bytes:
                    return
                self._verified(header)
            except FrameError:
                yield self._lose(1, time_ns)
                continue
            self._in_step = True
            self._in_head = False
            return

    def _lose(self, count: int, time_ns: int) -> Piece:
        """Give bytes up as unknown."""
        piece = Piece(self._buffer_ns, UNKNOWN, count, is_head=self._in_head)
        del self._buffer[:count]
        self._buffer_ns = time_ns
        return piece


def _frame_bytes(header: Header) -> int:
    return HEADER.size + header.message_bytes + header.body_bytes


def request_of(message: Message | None) -> str | None:
    """The request that a message belongs to; None for what belongs to a connection (pings, status, handshakes)."""
    if isinstance(message, KvBegin | Prefill):
        return message.spec.id
    if isinstance(message, _OF_TRANSFER):
        return message.transfer.rpartition(".")[0]  # kv_send.new_transfer_id
    if isinstance(message, _OF_REQUEST):
        return message.request
    return None
