"""The messages of KV transfers, by who speaks to whom. Data only; conventions are those of messages.py."""

from typing import Annotated

from msgspec import Meta

from workers.wire.messages import Count, FinishReason, Message, Name, RequestSpec, Text, TokenId, TokenLogprob

# -- prefill to decode, on a KV connection ---------------------------------------------------------------------


class KvBegin(Message, tag="kv-begin", frozen=True):
    """A transfer starts: KV of positions [first_block * block_size, tokens). `transfer` is unique per attempt.

    The sender relies on the receiver's cache for the blocks before `first_block`. Of two transfers of a request the one
    with the higher `attempt` counts: bytes of a connection that is given up may arrive after those of the next.
    """

    transfer: Name
    spec: RequestSpec
    first_block: Count
    tokens: Count
    attempt: Count = 0
    encoding: Name | None = None  # of the blocks' bytes (kv_encoding); None: as they are in the pool


class KvBlocks(Message, tag="kv-blocks", frozen=True):
    """Consecutive blocks, raw bytes in the body: `tokens[i]` tokens of block `first_block + i`, xxh3-64 of each."""

    transfer: Name
    first_block: Count
    tokens: Annotated[list[Count], Meta(min_length=1)]
    checksums: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]  # up to 2**64-1: no msgpack int64 bound


class KvEnd(Message, tag="kv-end", frozen=True):
    """All blocks were sent; the token that prefill sampled from them."""

    transfer: Name
    first_token: TokenId
    finish_reason: FinishReason = None
    first_logprob: TokenLogprob | None = None


class KvAbort(Message, tag="kv-abort", frozen=True):
    """The sender gives this transfer up; the connection stays good."""

    transfer: Name
    reason: Text


class Padding(Message, tag="padding", frozen=True):
    """Nothing, between other frames: a body to be dropped, which opens the connection's window, or none, which says
    that the sender is alive and waits for its prefill."""


# -- decode to prefill, on the same KV connection --------------------------------------------------------------


class KvReceived(Message, tag="kv-received", frozen=True):
    """Every byte is in its block and every checksum right."""

    transfer: Name
    received_ns: int


class KvRefused(Message, tag="kv-refused", frozen=True):
    """The transfer cannot be taken (no blocks, cancelled, bad checksum); the sender stops.

    `held_blocks`, with the error `kv_missing`: all that the receiver has; send the rest under a new transfer id. With
    the error `kv_later` there is no room yet: `KvWanted` will say when there is.
    """

    transfer: Name
    error: Name
    reason: Text
    held_blocks: Count | None = None


# -- decode to prefill, on the control connection --------------------------------------------------------------


class KvWanted(Message, tag="kv-wanted", frozen=True):
    """A request's `transfer` broke off, or there was no room for it and now there is. The blocks from `first_block` on
    are wanted, under a new transfer id.
    """

    request: Name
    first_block: Count
    transfer: Name


# -- relay decode to main decode, on a KV connection -----------------------------------------------------------


class KvTail(Message, tag="kv-tail", frozen=True):
    """KV of generated tokens [position, position + tokens), raw bytes in the body. Answered after the `last` one."""

    transfer: Name
    request: Name
    position: Count
    tokens: Annotated[int, Meta(ge=1, lt=1 << 32)]
    checksum: Annotated[int, Meta(ge=0)]
    last: bool = False
