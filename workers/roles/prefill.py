"""Prefill (P): computes what its cache lacks of the prompt's KV, samples the first token, and sends both to the decode
workers of the route: to each only the blocks that, by the mirror of its cache, it does not hold. With `kv_send:
chunked` they leave while the rest is computed.
"""

import asyncio
import itertools
import time

from workers.cache import CacheMirror
from workers.engine import Sequence
from workers.environment import WorkerEnvironment
from workers.models import LoadedModel
from workers.roles.request import ActiveRequest, logprobs_of
from workers.roles.worker import Worker
from workers.wire.deadlines import DeadlineExceeded, within
from workers.wire.frames import WireError
from workers.wire.kv_encoding import Fp8, KvEncoding
from workers.wire.kv_messages import KvWanted
from workers.wire.kv_send import Delivered, OutgoingKv, TransferAborted, TransferRefused
from workers.wire.kv_source import First, KvSource
from workers.wire.messages import CacheNotice, Message, RequestSpec, Undelivered, Without
from workers.wire.peers import KV_FLOWS
from workers.wire.stream import ConnectionLost

ATTEMPTS = 4  # at one delivery; each may find the mirror wrong once more, or lose its connection
WANTED_S = 1.0  # and a round trip: how long to wait for a receiver's word on what it still wants


class PrefillRequest(ActiveRequest):
    """A request on P."""

    def __init__(self, spec: RequestSpec, sequence: Sequence) -> None:
        super().__init__(spec, sequence)
        self.outgoing: dict[str, OutgoingKv] = {}
        """Transfers that read its blocks, by peer."""
        self.wanted: dict[str, asyncio.Future[int]] = {}
        """First block that each peer wants of its latest transfer, if that broke off or found no room."""
        self.names: list[bytes] = []
        """Names of the prompt's full blocks."""
        self.given_up: dict[str, str] = {}
        """Reason for sending nothing more, by peer."""

    def give_up(self, peer: str, reason: str) -> None:
        """End transfers to `peer`: when this returns none reads the blocks, and none will begin."""
        self.given_up.setdefault(peer, reason)
        if peer in self.outgoing:
            self.outgoing[peer].abort(reason)
        self.want(peer, 0)

    def heard(self, peer: str, message: KvWanted) -> None:
        """The peer's word on its latest transfer; a late one, on a transfer before that, counts for nothing."""
        latest = self.outgoing.get(peer)
        if latest is not None and latest.transfer == message.transfer:
            self.want(peer, message.first_block)

    def want(self, peer: str, first_block: int) -> None:
        """Whoever waits for the peer's word goes on."""
        wanted = self.wanted.get(peer)
        if wanted is not None and not wanted.done():
            wanted.set_result(first_block)


class PrefillWorker(Worker):
    """Serves the `prefill` role."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        super().__init__(environment, loaded)
        self.mirrors = {
            peer.name: CacheMirror() for peer in self.peers.known.values() if ("prefill", peer.role) in KV_FLOWS
        }
        self._chunked = environment.serving.kv_send == "chunked"
        self._wan_encoding: KvEncoding | None = None
        if environment.serving.kv_pool.wan_dtype == "fp8":
            self._wan_encoding = Fp8(loaded.config.kv_shape, self.pool.storage.dtype)

    def handle(self, peer: str, message: Message) -> None:
        if isinstance(message, CacheNotice) and peer in self.mirrors:
            self.mirrors[peer].apply(message.inserted, message.evicted, reset=message.reset)
        elif isinstance(message, KvWanted):
            active = self.active.get(message.request)
            if isinstance(active, PrefillRequest):
                active.heard(peer, message)
        else:
            super().handle(peer, message)

    def new_prefilling(self, spec: RequestSpec) -> PrefillRequest:
        return PrefillRequest(spec, self.new_sequence(spec))

    def go_without(self, gateway: str, message: Without) -> None:
        active = self.active.get(message.request)
        if isinstance(active, PrefillRequest):
            active.give_up(message.lost, f"{message.lost} is lost")

    def on_lost(self, peer: str, reason: str) -> None:
        super().on_lost(peer, reason)
        if peer in self.mirrors:
            self.mirrors[peer].apply([], [], reset=True)
        for active in self.active.values():
            if isinstance(active, PrefillRequest):
                active.want(peer, 0)  # its word may be lost

    async def serve(self, active: ActiveRequest) -> None:
        assert isinstance(active, PrefillRequest)
        spec, sequence = active.spec, active.sequence
        start_ns = time.monotonic_ns()
        source = KvSource(len(spec.prompt))
        targets = [name for name in (spec.relay, spec.main) if name is not None]
        active.names = list(self.runner.hashes(sequence)[: len(spec.prompt) // self.pool.block_size])
        deliveries: list[asyncio.Task[None]] = []

        def send() -> None:
            # Tasks of their own: cancelling the request must not cut a frame in half, only detach it from the blocks.
            deliveries.extend(self.spawn(self._deliver(active, name, source)) for name in targets)

        def more() -> None:
            source.advance(sequence.computed)
            if self._chunked and not deliveries:
                send()

        first = await self.runner.prefill(sequence, more)
        logprob = next(iter(logprobs_of(active, first)), None)
        source.finish(First(first.token_id, first.finish_reason, logprob))
        active.span("prefill", start_ns, time.monotonic_ns(), tokens=len(spec.prompt), cached=sequence.cached)
        self.answers.report(active)
        if not deliveries:
            send()
        await asyncio.wait(deliveries)

    async def _deliver(self, active: PrefillRequest, name: str, source: KvSource) -> None:
        """Give one decode worker what it lacks; tell the gateway when that fails."""
        spec = active.spec
        try:
            delivered, first_block = await self._attempts(active, name, source)
        except TransferAborted:
            return
        except WireError as error:
            # The other delivery goes on: whether the answer can be had from it is the gateway's decision.
            reason = f"KV to {name}: {error}"[:4000]
            failure = Undelivered(request=spec.id, peer=name, error=error.name, message=reason)
            self.peers.post_if_up(spec.gateway, failure)
            return
        active.span(
            self._transfer_name(name),
            delivered.start_ns,
            delivered.received_ns,
            peer=name,
            bytes=delivered.kv_bytes,
            tokens=len(spec.prompt),
            cached=first_block * self.pool.block_size,
            queue_ns=delivered.queue_ns,
            chunks=delivered.chunks,
            waited_ns=delivered.waited_ns,
            encoding=encoding.name if (encoding := self._encoding_to(name)) else "",
        )
        self.answers.report(active)

    async def _attempts(self, active: PrefillRequest, name: str, source: KvSource) -> tuple[Delivered, int]:
        """Deliver, again if the mirror was wrong or the connection broke. Returns the first block sent as well.

        The last attempt relies on nothing. Raises what the last one raised.
        """
        spec, mirror, hashes = active.spec, self.mirrors[name], active.names
        first_block = mirror.held(hashes)
        again = False
        """The receiver may have the KV already, or may have had it."""
        left = ATTEMPTS
        for attempt in itertools.count():
            left -= 1
            if name in active.given_up:  # while this task waited for its turn, or for the receiver's word
                raise TransferAborted(active.given_up[name])
            begun_ns = time.monotonic_ns()
            chunk_tokens = self.environment.serving.kv_chunk
            blocks, encoding = active.sequence.blocks, self._encoding_to(name)
            kv = OutgoingKv(spec, self.pool, blocks, source, first_block, chunk_tokens, encoding, attempt)
            active.outgoing[name] = kv
            active.wanted[name] = wanted = asyncio.get_running_loop().create_future()
            try:
                return await kv.deliver(self.peers.pools[name]), first_block
            except TransferRefused as refused:
                if again and refused.name in ("duplicate_transfer", "cancelled"):
                    # only the answer to an earlier attempt was lost: the KV is there, or was and has been used; or the
                    # receiver could do without it by the time there was room
                    raise TransferAborted(str(refused)) from None
                if refused.name == "kv_later":
                    left += 1  # nothing has failed
                    again = True
                    first_block = min(await wanted, len(hashes))
                    active.span("memory-wait", begun_ns, time.monotonic_ns(), peer=name)
                    continue
                if refused.held_blocks is None or left == 0:
                    raise
                mirror.correct(hashes, refused.held_blocks)
                first_block = min(refused.held_blocks, len(hashes)) if left > 1 else 0
            except (ConnectionLost, DeadlineExceeded):
                if left == 0:
                    raise
                again = True
                first_block = await self._still_wanted(wanted, name, first_block)
            active.span("kv-repair", begun_ns, time.monotonic_ns(), peer=name, bytes=kv.kv_bytes)
        raise AssertionError("the last attempt returns or raises")

    async def _still_wanted(self, wanted: "asyncio.Future[int]", name: str, first_block: int) -> int:
        """First block that the receiver wants after a broken transfer: the same as before if it says nothing."""
        try:
            path = self.peers.known[name].path
            async with within(lambda: WANTED_S + path.rtt_s + path.queue_s):
                return max(first_block, await wanted)
        except TimeoutError:
            return first_block

    def _is_here(self, peer: str) -> bool:
        return self.peers.known[peer].datacenter == self.environment.datacenter

    def _transfer_name(self, peer: str) -> str:
        return "fabric-transfer" if self._is_here(peer) else "wan-transfer"

    def _encoding_to(self, peer: str) -> KvEncoding | None:
        """Encoding of KV on the way to a peer; None: as it is in the pool."""
        return None if self._is_here(peer) else self._wan_encoding

    def release(self, active: ActiveRequest) -> None:
        assert isinstance(active, PrefillRequest)
        for name in (active.spec.relay, active.spec.main):
            if name is not None:
                active.give_up(name, "the request is over")
        super().release(active)
