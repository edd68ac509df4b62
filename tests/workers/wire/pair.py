"""Two ends of the wire with plain memory instead of models: what the transport tests speak through."""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any, Self

import torch

from tests.workers.proxy import Proxy
from workers.wire.connection import Local
from workers.wire.deadlines import Path
from workers.wire.frames import PROTOCOL_VERSION
from workers.wire.handshake import Facts
from workers.wire.kv_encoding import Fp8, KvEncoding
from workers.wire.kv_messages import KvBegin
from workers.wire.kv_receive import RefuseTransfer
from workers.wire.kv_send import OutgoingKv
from workers.wire.kv_source import First, KvSource
from workers.wire.messages import Message, RequestSpec, SamplingSpec
from workers.wire.peers import Peer, Peers
from workers.wire.stream import Target

FP8 = Fp8((1, 1, 1, 250), torch.float32)  # 1,000 bytes a token, as everything here
SECRET = bytes(range(32))
BLOCK_SIZE, BYTES_PER_TOKEN = 16, 1000


@dataclass(frozen=True, slots=True)
class QuickPath(Path):
    """A path whose deadlines fit a test; everything else is the real thing."""

    @property
    def connect_s(self) -> float:
        return 1.0

    @property
    def stall_s(self) -> float:
        return 1.0

    @property
    def ping_every_s(self) -> float:
        return 0.1

    @property
    def reply_s(self) -> float:
        return 1.0


def facts(name: str, role: str, **changes: Any) -> Facts:
    same = {
        "protocol": PROTOCOL_VERSION,
        "model": "m",
        "fingerprint": "f" * 32,
        "block_size": BLOCK_SIZE,
        "kv_shape": [2, 2, 1, 8],
        "kv_dtype": "float32",
    }
    return Facts(name=name, role=role, **{**same, **changes})


class Memory:
    """Blocks in a bytearray (wire's `Storage`)."""

    block_size = BLOCK_SIZE
    bytes_per_token = BYTES_PER_TOKEN

    def __init__(self, blocks: int, fill: int | None = None) -> None:
        block_bytes = BLOCK_SIZE * BYTES_PER_TOKEN
        self.data = bytearray(blocks * block_bytes)
        for index in range(len(self.data) if fill is not None else 0):
            self.data[index] = (index * 7 + index // 251 + (fill or 0)) % 256

    def view(self, block: int, num_tokens: int) -> memoryview:
        start = block * self.block_size * self.bytes_per_token
        return memoryview(self.data)[start : start + num_tokens * self.bytes_per_token]


class Sink:
    """One arriving transfer (wire's `IncomingKv`)."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._target: Target | None = None
        self.cancelled = False
        self.verified_blocks = 0
        self.result: asyncio.Future[tuple[str, Any]] = asyncio.get_running_loop().create_future()

    def views(self, first_block: int, tokens: list[int]) -> list[memoryview]:
        return [self._memory.view(first_block + i, count) for i, count in enumerate(tokens)]

    def attach(self, target: Target | None) -> None:
        self._target = target

    def verified(self, blocks: int) -> None:
        self.verified_blocks += blocks

    def complete(self, first_token: int, finish_reason: str | None, received_ns: int, first_logprob: object) -> None:
        self.result.set_result(("complete", first_token))

    def failed(self, error: str, reason: str) -> None:
        self.result.set_result((error, reason))

    def cancel(self) -> None:
        self.cancelled = True
        if self._target is not None:
            self._target.detach()


class End:
    """A worker's connections, with a log of what reached it (wire's `Handler` and `Receiver`)."""

    block_size = BLOCK_SIZE
    bytes_per_token = BYTES_PER_TOKEN

    def __init__(self, name: str, role: str, secret: bytes = SECRET, blocks: int = 64, **changes: Any) -> None:
        self.local = Local(facts(name, role, **changes), secret)
        self.memory = Memory(blocks)
        self.sinks: dict[str, Sink] = {}
        self.refuse: str | None = None
        self.messages: list[Message] = []
        self.lost: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]

    def connect(
        self, *others: "End", connections: int = 2, path: Path | None = None, warm_kv: bool = False, **ports: int
    ) -> Self:
        """Make this end's connections; `ports` overrides where a peer is looked for."""
        peers = [
            Peer(
                other.local.facts.name,
                other.local.facts.role,
                "dc",
                "127.0.0.1",
                ports.get(other.local.facts.name, other.port),
                path or QuickPath(),
            )
            for other in others
        ]
        self.peers = Peers(self.local, peers, self, self, connections, warm_kv=warm_kv)
        self.peers.kv_encodings = {FP8.name: FP8}
        return self

    async def __aenter__(self) -> Self:
        await self.peers.start(self.listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.peers.close()

    def begin(self, begin: KvBegin) -> Sink:
        if self.refuse is not None:
            raise RefuseTransfer("out_of_kv_blocks", self.refuse)
        sink = self.sinks[begin.spec.id] = Sink(self.memory)
        return sink

    def on_message(self, peer: str, message: Message) -> None:
        self.messages.append(message)

    def on_lost(self, peer: str, reason: str) -> None:
        self.lost.append(reason)

    def on_change(self) -> None:
        pass

    def status_for(self, peer: str) -> None:
        return None


class Wan:
    """p0 and md0 with a proxy between them; `connections` KV connections."""

    def __init__(
        self,
        connections: int = 2,
        blocks: int = 64,
        path: Path | None = None,
        warm_kv: bool = False,
        rate_bytes_per_s: float | None = None,
    ) -> None:
        self.p0, self.md0 = End("p0", "prefill"), End("md0", "main-decode", blocks=blocks)
        self.proxy = Proxy(self.md0.port)
        self.proxy.rate_bytes_per_s = rate_bytes_per_s
        self._connections = connections
        self._path = path
        self._warm_kv = warm_kv

    async def __aenter__(self) -> "Wan":
        await self.proxy.__aenter__()
        self.p0.connect(
            self.md0, connections=self._connections, path=self._path, warm_kv=self._warm_kv, md0=self.proxy.port
        )
        self.md0.connect(self.p0)
        await self.md0.__aenter__()
        await self.p0.__aenter__()
        self.pool = self.p0.peers.pools["md0"]
        await self.p0.peers.wait_connected(["md0"], 3)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.proxy.resume()
        await self.p0.__aexit__()
        await self.md0.__aexit__()
        await self.proxy.__aexit__()


def spec(request: str, tokens: int) -> RequestSpec:
    return RequestSpec(
        id=request,
        gateway="gw0",
        prefill="p0",
        relay=None,
        main="md0",
        prompt=[1] * tokens,
        sampling=SamplingSpec(max_tokens=1),
        deadline_s=30,
    )


def outgoing(
    memory: Memory, request: str, tokens: int, first_token: int = 5, encoding: KvEncoding | None = None
) -> OutgoingKv:
    blocks = list(range(-(-tokens // BLOCK_SIZE)))
    source = KvSource.finished(tokens, First(first_token))
    return OutgoingKv(spec(request, tokens), memory, blocks, source, encoding=encoding)
