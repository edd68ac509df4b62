"""Main decode (MD): takes the prompt's KV over the WAN, the answer's token ids from the relay, and goes on."""

import logging
import time

from workers.engine import Generated, OutOfBlocks, Sequence
from workers.environment import WorkerEnvironment
from workers.handover import SMALL_GAP, IdConflict, close_enough, overtakes
from workers.models import LoadedModel
from workers.roles.active import Active, RequestFailed, logprobs_of
from workers.roles.decode import DecodeWorker, Decoding
from workers.roles.handover import Following, write_tail
from workers.wire.frames import WireError
from workers.wire.messages import (
    HandOver,
    KvTail,
    Message,
    RequestSpec,
    StopRelay,
    TokenIds,
    TokenLogprob,
    Unheard,
    Without,
)

log = logging.getLogger(__name__)


class MainDecoding(Decoding):
    """A request on MD; the answer so far comes from the relay, or from the gateway when the relay is lost."""

    kv_event = "kv-transfer"  # across the WAN; the relay's comes over the fabric

    def __init__(self, spec: RequestSpec, sequence: Sequence, worker: DecodeWorker) -> None:
        super().__init__(spec, sequence, worker)
        self.asked_ns: int | None = None
        """When the relay was asked to hand over; before that, nobody needs it."""
        self.following = Following(worker.runner, sequence)
        self.overlapping = False
        """Decoding while the relay does."""
        self.behind = False
        """The relay has made tokens that are not made here: quicker to extend them all than to decode each."""
        self.told_to_stop = False
        """The relay was."""
        self.tail: int | None = 0
        """Generated tokens whose KV came from the relay; None: it is computed here."""


class MainDecodeWorker(DecodeWorker):
    """Serves the `main-decode` role. The modes of hand-over are told in workers/handover.py."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        super().__init__(environment, loaded)
        self.peers.tail_receiver = self

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> MainDecoding:
        return MainDecoding(spec, sequence, self)

    # -- what is heard -----------------------------------------------------------------------------------------

    def handle(self, peer: str, message: Message) -> None:
        if isinstance(message, TokenIds):
            return self.deliver_or_keep(message.request, message)
        return super().handle(peer, message)

    def deliver(self, active: MainDecoding, message: Message) -> None:
        assert isinstance(message, TokenIds | Without)
        following, relayed = active.following, active.following.relayed
        try:
            if isinstance(message, Without):
                self._relay_lost(active, message)
            else:
                relayed.offer(message.position, message.ids)
                following.relay_pace.note(time.monotonic_ns(), len(message.ids))
                if message.stopped_ns is not None:
                    relayed.stop(message.stopped_ns, message.finish_reason, message.tail)
        except IdConflict as conflict:
            active.end(RequestFailed(conflict.name, f"{self.environment.host}: {conflict}"))
        following.note()
        if active.overlapping:
            self._while_overlapping(active)

    def _relay_lost(self, active: MainDecoding, message: Without) -> None:
        """Go on from what the gateway has, or this worker, whichever is more. Raises IdConflict."""
        relayed = active.following.relayed
        if not active.overlapping:  # else this worker's own tokens are among them
            relayed.offer(relayed.start, message.ids)
        if not relayed.over or message.finish_reason is None:
            relayed.stop(time.monotonic_ns(), message.finish_reason, 0)
        if message.finish_reason is None:
            self._say_again(active, len(message.ids))

    def take_tail(self, peer: str, tail: KvTail, kv: memoryview) -> str | None:
        active = self.active.get(tail.request)
        if not isinstance(active, MainDecoding) or active.tail is None or not active.arrived.done():
            return f"request {tail.request} does not wait for KV on {self.environment.host}"
        if peer != active.spec.relay or tail.position != active.sequence.prompt_len + active.tail:
            return f"KV of {peer} from position {tail.position} on is not the next of request {tail.request}"
        try:
            write_tail(self.runner, active.sequence, tail.position, tail.tokens, kv)
        except OutOfBlocks as error:
            return f"{self.environment.host}: {error}"
        active.tail += tail.tokens
        active.following.note()
        return None

    # -- what is done ------------------------------------------------------------------------------------------

    async def serve(self, active: Active) -> None:
        assert isinstance(active, MainDecoding)
        first, finish = await active.arrived
        if active.spec.relay is None:
            await self.decode_from_first(active, "main-decode", first, finish)
        else:
            await self._take_over(active, active.spec.relay, first, finish)

    async def _take_over(self, active: MainDecoding, relay: str, first: int, finish: str | None) -> None:
        """P-RLD-MD: ask for the ids, compute their KV, go on where the relay stopped, or before it stops."""
        following, relayed = active.following, active.following.relayed
        ready_ns = time.monotonic_ns()
        await self._ask(active, relay)
        await self._catch_up(active, relay)
        ids_ns = time.monotonic_ns()
        if relayed.finish_reason is not None or active.finished:
            await self._complete_cache(active)
            return
        if not relayed.ids:  # the relay was lost before its first token
            await self.decode_from_first(active, "main-decode", first, finish)
            return
        if relayed.tail:
            await self._await_tail(active, relay)
        active.tail = None
        extend_ns = time.monotonic_ns()
        recomputed = active.sequence.prompt_len + len(relayed.ids) - active.sequence.computed
        token = await following.follow()
        if relayed.finish_reason is not None or active.finished:  # in `overlap`, where it had not stopped
            await self._complete_cache(active)
            return
        done_ns, inherited, rounds = time.monotonic_ns(), len(relayed.ids), len(following.rounds)
        active.span("hand-over", ready_ns, ids_ns, peer=relay, tokens=inherited, rounds=rounds)
        if relayed.stopped_ns is not None:
            active.span("relay-stopped", relayed.stopped_ns, relayed.stopped_ns, peer=relay)
        active.span("extend", extend_ns, done_ns, tokens=recomputed)
        self.report(active)
        active.begin_decode("main-decode", inherited)
        await self._go_on(active, token)

    async def _ask(self, active: MainDecoding, relay: str) -> None:
        """Ask the relay to hand over; return when it, or the gateway in its place, has said something."""
        active.asked_ns = time.monotonic_ns()
        relayed = active.following.relayed
        if relayed.over:
            return
        try:
            self.peers.post(relay, HandOver(request=active.spec.id, mode=self.environment.serving.handoff))
        except WireError as error:
            await self._ask_gateway(active, relay, str(error))
            return
        while not relayed.ids and not relayed.over:
            await self._hear(active, relay)

    async def _catch_up(self, active: MainDecoding, relay: str) -> None:
        """Round after round, as long as the relay goes on; in `overlap` only until the gap is small."""
        following, relayed = active.following, active.following.relayed
        overlap = self.environment.serving.handoff == "overlap"
        while not relayed.over:
            if following.waiting:
                await following.follow()
            else:
                await self._hear(active, relay)
            if not close_enough(following.rounds, following.waiting):
                continue
            if overlap:
                return
            self._stop_relay(active)

    async def _go_on(self, active: MainDecoding, token: Generated) -> None:
        """Emit what follows the relay's ids, and decode to the end; while both decode, skip what the relay has made."""
        relayed, sequence = active.following.relayed, active.sequence
        active.overlapping = not relayed.over
        while True:
            active.behind = False
            self.emit(active, token.position, [token.token_id], token.finish_reason, logprobs_of(active, token))
            if token.finish_reason is None:
                await self.decode(active)
            ended = sequence.finish_reason is not None or relayed.finish_reason is not None or active.finished
            if ended or not active.behind:
                break
            token = await active.following.follow()
            active.begin_decode("main-decode", len(relayed.ids))
        if active.overlapping and relayed.finish_reason is not None:
            await self._complete_cache(active)

    def _stop_relay(self, active: MainDecoding) -> None:
        if not active.told_to_stop and active.spec.relay is not None:
            active.told_to_stop = True
            self.peers.post_if_up(active.spec.relay, StopRelay(request=active.spec.id))

    def _while_overlapping(self, active: MainDecoding) -> None:
        """More was heard of the relay: the end of the answer, ids that are not made here yet, or how fast it is."""
        following, relayed = active.following, active.following.relayed
        if relayed.finish_reason is not None:
            if following.agrees:
                self.stop_decoding(active)
            return
        if len(relayed.ids) > len(active.answer) + SMALL_GAP and following.agrees:
            active.behind = True
            self.stop_decoding(active)
        if relayed.over:
            return
        relay, relay_itl, own_itl = active.spec.relay, following.relay_pace.itl_ns, following.own_pace.itl_ns
        if relay is None or relay_itl is None or own_itl is None:
            return
        if not overtakes(relay_itl, own_itl, self.peers.known[relay].path.rtt_ns):
            self._stop_relay(active)

    def emit(
        self,
        active: Active,
        position: int,
        ids: list[int],
        finish_reason: str | None,
        logprobs: list[TokenLogprob],
    ) -> None:
        super().emit(active, position, ids, finish_reason, logprobs)
        if isinstance(active, MainDecoding) and active.overlapping:
            active.following.own_pace.note(time.monotonic_ns(), len(ids))

    async def _complete_cache(self, active: MainDecoding) -> None:
        """The relay finished the answer: compute its KV all the same, for the next turn to find.

        Else the cache here would fall behind those of prefill and relay, and misses would breed misses.
        """
        waiting = active.following.waiting
        if not waiting:
            return
        active.tail = None
        start_ns = time.monotonic_ns()
        try:
            await active.following.follow()
        except OutOfBlocks as error:
            log.warning("request %s ended on the relay; its answer's KV is not kept here: %s", active.spec.id, error)
            return
        active.span("extend-for-cache", start_ns, time.monotonic_ns(), tokens=waiting)

    # -- waiting -----------------------------------------------------------------------------------------------

    async def _hear(self, active: MainDecoding, relay: str) -> None:
        """Wait for more of the relay; if it cannot be heard in time, for the gateway's word. Raises RequestFailed."""
        # an answer that is nearly over may finish on the relay first, so the relay always has something to send
        reply_s = self.peers.known[relay].path.reply_s
        try:
            await active.following.news(reply_s)
        except TimeoutError:
            await self._ask_gateway(active, relay, f"{relay} sent no token ids within {reply_s:.1f} s")

    async def _ask_gateway(self, active: MainDecoding, relay: str, reason: str) -> None:
        self._unheard(active, reason)
        gateway_s = self.peers.known[active.spec.gateway].path.reply_s
        relayed = active.following.relayed
        try:
            while not relayed.over:
                await active.following.news(gateway_s)
        except TimeoutError:
            raise RequestFailed(
                "handover_deadline",
                f"{self.environment.host}: no token ids from {relay}, nor within {gateway_s:.1f} s from the gateway",
            ) from None

    async def _await_tail(self, active: MainDecoding, relay: str) -> None:
        """Wait for the KV that the relay has announced, as long as it keeps coming and the relay does not give up."""
        following, relayed = active.following, active.following.relayed
        start_ns, stall_s = time.monotonic_ns(), self.peers.known[relay].path.stall_s
        try:
            while active.tail is not None and active.tail < relayed.tail:
                await following.news(stall_s)
        except TimeoutError:
            log.info("request %s: no KV of the answer came within %.1f s; computing it", active.spec.id, stall_s)
        came = min(active.tail or 0, len(relayed.ids) - 1)
        active.sequence.computed = active.sequence.prompt_len + came
        active.span("kv-tail", start_ns, time.monotonic_ns(), peer=relay, tokens=came)

    def _unheard(self, active: MainDecoding, reason: str) -> None:
        relay = active.spec.relay or ""
        self.peers.post_if_up(active.spec.gateway, Unheard(request=active.spec.id, peer=relay, reason=reason[:4000]))

    def _say_again(self, active: MainDecoding, known: int) -> None:
        """The relay was lost: what it said last may be known here and to nobody else."""
        relayed = active.following.relayed
        answer, finish = active.answer, active.sequence.finish_reason or relayed.finish_reason
        if len(answer) < len(relayed.ids):  # not extended yet
            answer, finish = relayed.ids, relayed.finish_reason
        if len(answer) <= known:
            return
        if active.spec.sampling.logprobs is not None:  # of which the relay's are lost
            active.end(RequestFailed("relay_lost", f"{active.spec.relay} was lost before all it said was heard"))
            return
        self.emit(active, active.sequence.prompt_len + known, answer[known:], finish, [])

    def on_lost(self, peer: str, reason: str) -> None:
        super().on_lost(peer, reason)
        for active in self.active.values():
            if not isinstance(active, MainDecoding) or active.spec.relay != peer or active.asked_ns is None:
                continue
            relayed = active.following.relayed
            if not relayed.over:
                self._unheard(active, f"{peer} was lost before the hand-over: {reason}")
            elif relayed.tail:  # it will not come any more
                relayed.tail = 0
                active.following.note()
