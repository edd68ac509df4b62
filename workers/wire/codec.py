"""Messages to msgpack and back, and which kind of frame carries which."""

import msgspec

from workers.wire.frames import FrameError, Kind
from workers.wire.handshake import Hello, Proof, Refused, Welcome
from workers.wire.kv_messages import KvAbort, KvBegin, KvBlocks, KvEnd, KvReceived, KvRefused, KvTail, KvWanted, Padding
from workers.wire.messages import (
    CacheNotice,
    Cancel,
    Failed,
    Finish,
    HandOver,
    Message,
    Ping,
    Pong,
    Prefill,
    Report,
    Status,
    StopRelay,
    TokenIds,
    Tokens,
    Undelivered,
    Unheard,
    Without,
)

Handshake = Hello | Welcome | Proof | Refused
Control = (
    Ping
    | Pong
    | Status
    | CacheNotice
    | Prefill
    | Cancel
    | Finish
    | Without
    | KvBegin
    | KvEnd
    | KvAbort
    | KvReceived
    | KvRefused
    | KvWanted
    | HandOver
    | StopRelay
    | Report
    | Failed
    | Undelivered
    | Unheard
)
Ids = Tokens | TokenIds

_ENCODER = msgspec.msgpack.Encoder()
_PADDING = _ENCODER.encode(Padding())
_DECODERS: dict[Kind, msgspec.msgpack.Decoder] = {
    Kind.HANDSHAKE: msgspec.msgpack.Decoder(Handshake),
    Kind.CONTROL: msgspec.msgpack.Decoder(Control),
    Kind.TOKEN_IDS: msgspec.msgpack.Decoder(Ids),
    Kind.KV: msgspec.msgpack.Decoder(KvBlocks | KvTail),
    Kind.PADDING: msgspec.msgpack.Decoder(Padding),
}


def kind_of(message: Message) -> Kind:
    """The frame kind, hence the byte class, of a message."""
    if isinstance(message, KvBlocks | KvTail):
        return Kind.KV
    if isinstance(message, Padding):
        return Kind.PADDING
    if isinstance(message, Tokens | TokenIds):
        return Kind.TOKEN_IDS
    if isinstance(message, Hello | Welcome | Proof | Refused):
        return Kind.HANDSHAKE
    return Kind.CONTROL


def encode(message: Message) -> bytes:
    """msgpack bytes of a message."""
    return _ENCODER.encode(message)


def decode(kind: Kind, data: bytes | memoryview) -> Message:
    """The message of a frame of `kind`. Raises FrameError for anything else than exactly one valid message."""
    if kind is Kind.PADDING and data != _PADDING:  # msgspec asks for a tag only where there are several
        raise FrameError("PADDING message does not decode: it is to say nothing")
    try:
        message: Message = _DECODERS[kind].decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise FrameError(f"{kind.name} message does not decode: {error}") from None
    return message
