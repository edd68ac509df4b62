"""KV blocks as plain memory, and transfers into it: what `workers.wire` asks of a worker's storage."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workers.wire.kv_messages import KvBegin
from workers.wire.kv_receive import IncomingKv, RefuseTransfer
from workers.wire.messages import TokenLogprob
from workers.wire.stream import Target


@dataclass(frozen=True, slots=True)
class Shape:
    """A prompt and its KV: `tokens` of `bytes_per_token`, in blocks of `block_size` tokens."""

    tokens: int
    block_size: int
    bytes_per_token: int

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.block_size)

    @property
    def bytes(self) -> int:
        """KV of a whole prompt."""
        return self.tokens * self.bytes_per_token


class Memory:
    """`prompts` prompts' worth of blocks, filled at random."""

    def __init__(self, shape: Shape, prompts: int = 1) -> None:
        self.block_size = shape.block_size
        self.bytes_per_token = shape.bytes_per_token
        self._block_bytes = shape.block_size * shape.bytes_per_token
        self._data = memoryview(bytearray(os.urandom(prompts * shape.blocks * self._block_bytes)))

    def view(self, block: int, num_tokens: int) -> memoryview:
        """The bytes of a block's first tokens."""
        start = block * self._block_bytes
        return self._data[start : start + num_tokens * self.bytes_per_token]


class Arrival:
    """One transfer on its way into a prompt's place (wire's `IncomingKv`)."""

    cancelled = False

    def __init__(self, memory: Memory, first: int, done: Callable[[], None]) -> None:
        self._memory = memory
        self._first = first
        self._done = done

    def views(self, first_block: int, tokens: list[int]) -> list[memoryview]:
        return [self._memory.view(self._first + first_block + i, count) for i, count in enumerate(tokens)]

    def attach(self, target: Target | None) -> None:
        pass

    def verified(self, blocks: int) -> None:
        pass

    def complete(
        self, first_token: int, finish_reason: str | None, received_ns: int, first_logprob: TokenLogprob | None
    ) -> None:
        self._done()

    def failed(self, error: str, reason: str) -> None:
        self._done()


class Shelf:
    """Places for as many prompts as connections can bring at once (wire's `Receiver`)."""

    def __init__(self, shape: Shape, places: int) -> None:
        self.block_size = shape.block_size
        self.bytes_per_token = shape.bytes_per_token
        self.encodings: Mapping[str, Any] = {}  # KV comes as it is
        self._blocks = shape.blocks
        self._memory = Memory(shape, places)
        self._free = list(range(places))

    def begin(self, begin: KvBegin) -> IncomingKv:
        if not self._free:
            raise RefuseTransfer("out_of_kv_blocks", "more transfers at once than connections")
        place = self._free.pop()
        return Arrival(self._memory, place * self._blocks, lambda: self._free.append(place))
