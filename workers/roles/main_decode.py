"""Main decode (MD): takes the prompt's KV over the WAN, the answer's token ids from the relay, and goes on."""

import asyncio
import logging
import time

from workers.engine import OutOfBlocks, Sequence
from workers.roles.active import Active, RequestFailed, logprobs_of
from workers.roles.decode import DecodeWorker, Decoding
from workers.wire.frames import WireError
from workers.wire.messages import HandOver, Message, RequestSpec, TokenIds, Unheard, Without

log = logging.getLogger(__name__)


class MainDecoding(Decoding):
    """A request on MD; `ids` come from the relay, or from the gateway when the relay is lost."""

    kv_event = "kv-transfer"  # across the WAN; the relay's comes over the fabric

    def __init__(self, spec: RequestSpec, sequence: Sequence, worker: DecodeWorker) -> None:
        super().__init__(spec, sequence, worker)
        self.asked = False
        """The relay was asked to hand over; before that, nobody needs it."""
        self.ids: asyncio.Future[TokenIds | Without] = asyncio.get_running_loop().create_future()


class MainDecodeWorker(DecodeWorker):
    """Serves the `main-decode` role."""

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> MainDecoding:
        return MainDecoding(spec, sequence, self)

    def handle(self, peer: str, message: Message) -> None:
        if isinstance(message, TokenIds):
            return self.deliver_or_keep(message.request, message)
        return super().handle(peer, message)

    def deliver(self, active: MainDecoding, message: Message) -> None:
        assert isinstance(message, TokenIds | Without)
        if not active.ids.done():
            active.ids.set_result(message)
        elif isinstance(message, Without) and message.finish_reason is None:
            self._say_again(active, active.ids.result(), len(message.ids))

    async def serve(self, active: Active) -> None:
        assert isinstance(active, MainDecoding)
        first, finish = await active.arrived
        if active.spec.relay is None:
            await self.decode_from_first(active, "main-decode", first, finish)
        else:
            await self._take_over(active, active.spec.relay, first, finish)

    async def _take_over(self, active: MainDecoding, relay: str, first: int, finish: str | None) -> None:
        """P-RLD-MD: ask for the ids, recompute their KV in one extend, go on where the relay stopped."""
        ready_ns = time.monotonic_ns()
        relayed = await self._ids(active, relay)
        ids_ns = time.monotonic_ns()
        if relayed.finish_reason is not None or active.finished:
            await self._complete_cache(active, relayed)
            return
        if not relayed.ids:  # the relay was lost before its first token
            await self.decode_from_first(active, "main-decode", first, finish)
            return
        token = await self.runner.extend(active.sequence, relayed.ids)
        active.span("hand-over", ready_ns, ids_ns, peer=relay, tokens=len(relayed.ids))
        if isinstance(relayed, TokenIds) and relayed.stopped_ns is not None:
            active.span("relay-stopped", relayed.stopped_ns, relayed.stopped_ns, peer=relay)
        active.span("extend", ids_ns, time.monotonic_ns(), tokens=len(relayed.ids))
        self.report(active)
        active.begin_decode("main-decode", inherited=len(relayed.ids))
        self.emit(active, token.position, [token.token_id], token.finish_reason, logprobs_of(active, token))
        if token.finish_reason is None:
            await self.decode(active)

    async def _complete_cache(self, active: MainDecoding, relayed: TokenIds | Without) -> None:
        """The relay finished the answer: compute its KV all the same, for the next turn to find.

        Else the cache here would fall behind those of prefill and relay, and misses would breed misses.
        """
        if not relayed.ids:
            return
        start_ns = time.monotonic_ns()
        try:
            await self.runner.extend(active.sequence, relayed.ids)
        except OutOfBlocks as error:
            log.warning("request %s ended on the relay; its answer's KV is not kept here: %s", active.spec.id, error)
            return
        active.span("extend-for-cache", start_ns, time.monotonic_ns(), tokens=len(relayed.ids))

    async def _ids(self, active: MainDecoding, relay: str) -> TokenIds | Without:
        """The answer so far: from the relay, or, if it cannot be heard in time, from the gateway."""
        # an answer that is nearly over may finish on the relay first, so the relay always has something to send
        reply_s = self.peers.known[relay].path.reply_s
        gateway_s = self.peers.known[active.spec.gateway].path.reply_s
        try:
            if not active.ids.done():
                self.peers.post(relay, HandOver(request=active.spec.id))
            active.asked = True
            async with asyncio.timeout(reply_s):
                return await asyncio.shield(active.ids)
        except TimeoutError:
            self._unheard(active, f"{relay} sent no token ids within {reply_s:.1f} s")
        except WireError as error:
            self._unheard(active, str(error))
        try:
            async with asyncio.timeout(gateway_s):
                return await active.ids
        except TimeoutError:
            raise RequestFailed(
                "handover_deadline",
                f"{self.environment.host}: no token ids from {relay}, nor within {gateway_s:.1f} s from the gateway",
            ) from None

    def _unheard(self, active: MainDecoding, reason: str) -> None:
        relay = active.spec.relay or ""
        self.peers.post_if_up(active.spec.gateway, Unheard(request=active.spec.id, peer=relay, reason=reason[:4000]))

    def _say_again(self, active: MainDecoding, relayed: TokenIds | Without, known: int) -> None:
        """The relay was lost after it had handed over: what it said last may be known here and to nobody else."""
        answer, finish = active.answer, active.sequence.finish_reason or relayed.finish_reason
        if len(answer) < len(relayed.ids):  # not extended yet
            answer, finish = relayed.ids, relayed.finish_reason
        if len(answer) <= known:
            return
        if active.spec.sampling.logprobs is not None:  # of which the relay's are lost
            active.end(RequestFailed("worker_lost", f"{active.spec.relay} was lost before all it said was heard"))
            return
        self.emit(active, active.sequence.prompt_len + known, answer[known:], finish, [])

    def on_lost(self, peer: str, reason: str) -> None:
        super().on_lost(peer, reason)
        for active in self.active.values():
            if (
                isinstance(active, MainDecoding)
                and active.spec.relay == peer
                and active.asked
                and not active.ids.done()
            ):
                self._unheard(active, f"{peer} was lost before the hand-over: {reason}")
