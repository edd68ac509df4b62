"""Main decode (MD): takes the prompt's KV over the WAN, the answer's token ids from the relay, and goes on."""

import asyncio
import logging
import time

from workers.engine import OutOfBlocks, Sequence
from workers.roles.decode import DecodeWorker, Decoding
from workers.roles.worker import Active, RequestFailed, logprobs_of
from workers.wire.messages import HandOver, Message, RequestSpec, TokenIds

log = logging.getLogger(__name__)


class MainDecoding(Decoding):
    """A request on MD; `ids` come from the relay."""

    kv_event = "kv-transfer"  # across the WAN; the relay's comes over the fabric

    def __init__(self, spec: RequestSpec, sequence: Sequence, worker: DecodeWorker) -> None:
        super().__init__(spec, sequence, worker)
        self.ids: asyncio.Future[TokenIds] = asyncio.get_running_loop().create_future()


class MainDecodeWorker(DecodeWorker):
    """Serves the `main-decode` role."""

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> MainDecoding:
        return MainDecoding(spec, sequence, self)

    def handle(self, peer: str, message: Message) -> None:
        if isinstance(message, TokenIds):
            return self.deliver_or_keep(message.request, message)
        return super().handle(peer, message)

    def deliver(self, active: MainDecoding, message: Message) -> None:
        assert isinstance(message, TokenIds)
        if not active.ids.done():
            active.ids.set_result(message)

    async def serve(self, active: Active) -> None:
        assert isinstance(active, MainDecoding)
        first, finish = await active.arrived
        if active.spec.relay is None:
            await self.decode_from_first(active, "main-decode", first, finish)
        else:
            await self._take_over(active, active.spec.relay)

    async def _take_over(self, active: MainDecoding, relay: str) -> None:
        """P-RLD-MD: ask for the ids, recompute their KV in one extend, go on where the relay stopped."""
        ready_ns = time.monotonic_ns()
        if not active.ids.done():
            self.peers.post(relay, HandOver(request=active.spec.id))
        relayed = await self._ids(active, relay)
        ids_ns = time.monotonic_ns()
        if relayed.finish_reason is not None or active.finished:
            await self._complete_cache(active, relayed)
            return
        token = await self.runner.extend(active.sequence, relayed.ids)
        active.span("hand-over", ready_ns, ids_ns, peer=relay, tokens=len(relayed.ids))
        active.span("relay-stopped", relayed.stopped_ns, relayed.stopped_ns, peer=relay)
        active.span("extend", ids_ns, time.monotonic_ns(), tokens=len(relayed.ids))
        self.report(active)
        active.begin_decode("main-decode", inherited=len(relayed.ids))
        self.emit(active, token.position, [token.token_id], token.finish_reason, logprobs_of(active, token))
        if token.finish_reason is None:
            await self.decode(active)

    async def _complete_cache(self, active: MainDecoding, relayed: TokenIds) -> None:
        """The relay finished the answer: compute its KV all the same, for the next turn to find.

        Else the cache here would fall behind those of prefill and relay, and misses would breed misses.
        """
        start_ns = time.monotonic_ns()
        try:
            await self.runner.extend(active.sequence, relayed.ids)
        except OutOfBlocks as error:
            log.warning("request %s ended on the relay; its answer's KV is not kept here: %s", active.spec.id, error)
            return
        active.span("extend-for-cache", start_ns, time.monotonic_ns(), tokens=len(relayed.ids))

    async def _ids(self, active: MainDecoding, relay: str) -> TokenIds:
        # an answer that is nearly over may finish on the relay first, so the relay always has something to send
        reply_s = self.peers.known[relay].path.reply_s
        try:
            async with asyncio.timeout(reply_s):
                return await active.ids
        except TimeoutError:
            raise RequestFailed(
                "handover_deadline", f"{self.environment.host}: {relay} sent no token ids within {reply_s:.1f} s"
            ) from None

    def on_lost(self, peer: str, reason: str) -> None:
        super().on_lost(peer, reason)
        for active in list(self.active.values()):
            if active.spec.relay == peer and isinstance(active, MainDecoding) and not active.ids.done():
                active.end(RequestFailed("worker_lost", f"{peer} was lost before the hand-over: {reason}"))
