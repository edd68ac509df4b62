"""Relay decode (RLD): answers at once over the fabric, until main decode holds the KV and takes over."""

import asyncio
import logging
import time

from workers.engine import Sequence
from workers.environment import WorkerEnvironment
from workers.handover import RelayLoad, choose_mode
from workers.models import LoadedModel
from workers.roles.decode import DecodeWorker
from workers.roles.incoming import DecodeRequest
from workers.roles.request import ActiveRequest
from workers.wire.codec import encode
from workers.wire.frames import HEADER, WireError
from workers.wire.kv_messages import KvBegin, KvWanted
from workers.wire.kv_receive import RefuseTransfer
from workers.wire.kv_tail import OutgoingTail
from workers.wire.messages import HandOver, Message, Report, RequestSpec, Span, StopRelay, TokenIds, Without

log = logging.getLogger(__name__)


class RelayRequest(DecodeRequest):
    """A request on RLD."""

    def __init__(self, spec: RequestSpec, sequence: Sequence, block_size: int) -> None:
        super().__init__(spec, sequence, block_size)
        self.begun_ns = time.monotonic_ns()
        self.asked_ns: int | None = None
        """Time at which main decode asked for it."""
        self.mode, self.reason = "", ""
        self.live = False
        """Main decode is sent each id as it is made."""
        self.stopping = False
        """No further token is made."""
        self.main_lost = False
        """Nobody will take it over."""
        self.sent_ids, self.id_bytes = 0, 0
        self.tail: OutgoingTail | None = None


class RelayDecodeWorker(DecodeWorker):
    """Serves the `relay-decode` role. The modes of hand-over are told in workers/handover.py."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        super().__init__(environment, loaded)
        self.answers.on_emit = self._emitted

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> RelayRequest:
        return RelayRequest(spec, sequence, self.block_size)

    def handle(self, peer: str, message: Message) -> None:
        if isinstance(message, HandOver) and (begin := self.leave_queue(message.request)) is not None:
            return self._pass_on(begin, message.mode)
        if isinstance(message, HandOver | StopRelay):
            return self.deliver_or_keep(message.request, message)
        return super().handle(peer, message)

    def begin_or_queue(self, begin: KvBegin) -> DecodeRequest:
        try:
            return super().begin_or_queue(begin)
        except RefuseTransfer as refusal:
            asked = next((m for m in self.early(begin.spec.id) if isinstance(m, HandOver)), None)
            if refusal.error == "kv_later" and asked is not None:
                self.leave_queue(begin.spec.id)
                self._pass_on(begin, asked.mode)
            raise

    def _pass_on(self, begin: KvBegin, mode: str) -> None:
        """Leave a request that there is no room for yet to main decode, which is ready, from its first token on."""
        spec, now_ns = begin.spec, time.monotonic_ns()
        self.ended[spec.id] = True
        over = TokenIds(request=spec.id, position=len(spec.prompt), ids=[], stopped_ns=now_ns)
        self.peers.post_if_up(spec.main or "", over)
        full = len(spec.prompt) // self.pool.block_size  # prefill asks once more, and hears that it is over here
        self.peers.post_if_up(spec.prefill, KvWanted(request=spec.id, first_block=full, transfer=begin.transfer))
        why = "main decode was ready before the relay had room"
        span = Span(name="relay-stop", start_ns=now_ns, end_ns=now_ns, mode=mode, reason=why)
        self.peers.post_if_up(spec.gateway, Report(request=spec.id, spans=[span], done=True))

    def deliver(self, active: RelayRequest, message: Message) -> None:
        if isinstance(message, Without):
            active.main_lost = True
            active.live = False
        elif active.main_lost:
            pass
        elif isinstance(message, StopRelay):
            self._stop(active)
        elif isinstance(message, HandOver) and active.asked_ns is None:
            active.asked_ns = time.monotonic_ns()
            active.mode, active.reason = choose_mode(message.mode, self._load(active))
            if active.mode in ("catch-up", "overlap"):
                active.live = True
                self._send_ids(active)
            else:
                self._stop(active)

    def _load(self, active: RelayRequest) -> RelayLoad:
        """Load of this worker, apart from one request."""
        others = [other for other in self.active.values() if other is not active and isinstance(other, RelayRequest)]
        waiting = sum(not other.arrived.done() for other in others) + len(self.room.waiting)
        free = (self.pool.free_count + self.cache.policy.evictable) / self.pool.num_blocks
        return RelayLoad(self.runner.running - active.decoding, waiting, free, active.arrived.done())

    def _stop(self, active: RelayRequest) -> None:
        active.stopping = True
        self.answers.stop(active)

    def _emitted(self, active: ActiveRequest, _count: int) -> None:
        if isinstance(active, RelayRequest) and active.live:
            self._send_ids(active)

    async def serve(self, active: ActiveRequest) -> None:
        assert isinstance(active, RelayRequest)
        sequence = active.sequence
        first, finish = await active.arrived
        if not active.stopping:
            await self.answers.decode_from_first(active, "relay-decode", first, finish)
        else:  # main decode had the KV sooner than this worker: one token, and on to the hand-over
            active.begin_decode("relay-decode")
            sequence.tokens.append(first)
            sequence.finish_reason = finish  # type: ignore[assignment]
            self.answers.emit_first(active, first, finish)
        active.end_decode()
        stopped_ns = time.monotonic_ns()
        finish = sequence.finish_reason or ("stop" if active.finished else None)
        handed_over = await self._hand_over(active, stopped_ns, finish)
        if active.asked_ns is not None:
            active.span("relay-stop", active.asked_ns, stopped_ns, mode=active.mode, reason=active.reason)
        if not handed_over and finish is None:
            active.begin_decode("relay-decode", inherited=len(active.answer))
            await self.answers.decode(active)

    async def _hand_over(self, active: RelayRequest, stopped_ns: int, finish: str | None) -> bool:
        """Give main decode the ids, also of an answer that ended here: it keeps the turn for the next one.

        False when there is nobody to take over: the answer goes on here.
        """
        main, sequence = active.spec.main, active.sequence
        if main is None or active.main_lost:
            return False
        if finish is not None and self.environment.serving.end_on_rld:
            return True
        computed = max(0, sequence.computed - sequence.prompt_len)  # 0: its blocks were taken away in the end
        tail = computed if active.mode == "kv" and finish is None and main in self.peers.pools else 0
        if not self._send_ids(active, stopped_ns, finish, tail):
            return False
        sent_ns = time.monotonic_ns()
        active.span("relay-ids", stopped_ns, sent_ns, peer=main, bytes=active.id_bytes, tokens=len(active.answer))
        if tail:
            # A task of its own: cancelling the request must not cut a frame in half, only detach it from the blocks.
            await asyncio.shield(self.spawn(self._send_tail(active, main, tail)))
        return True

    def _send_ids(
        self, active: RelayRequest, stopped_ns: int | None = None, finish: str | None = None, tail: int = 0
    ) -> bool:
        """Send main decode the ids that it was not sent yet; False when it is not there."""
        main, answer = active.spec.main, active.answer
        if main is None or (stopped_ns is None and len(answer) == active.sent_ids):
            return True
        message = TokenIds(
            request=active.spec.id,
            position=active.sequence.prompt_len + active.sent_ids,
            ids=answer[active.sent_ids :],
            stopped_ns=stopped_ns,
            finish_reason=finish,
            tail=tail,
        )
        try:
            self.peers.post(main, message)
        except WireError as error:
            log.info("request %s goes on here: %s", active.spec.id, error)
            active.live = False
            return False
        active.sent_ids = len(answer)
        active.id_bytes += HEADER.size + len(encode(message))
        return True

    async def _send_tail(self, active: RelayRequest, main: str, tokens: int) -> None:
        """Give main decode the KV of the first `tokens` generated ones; if that fails it has the ids to compute it."""
        sequence = active.sequence
        start = sequence.prompt_len
        active.tail = kv = OutgoingTail(active.spec.id, self.pool, sequence.blocks, start, start + tokens)
        try:
            sent = await kv.deliver(self.peers.pools[main])
        except WireError as error:
            log.info("KV of request %s's answer was not taken by %s: %s", active.spec.id, main, error)
            self._send_ids(active, time.monotonic_ns())
            return
        active.span(
            "relay-kv",
            sent.start_ns,
            sent.received_ns,
            peer=main,
            bytes=sent.kv_bytes,
            tokens=tokens,
            queue_ns=sent.queue_ns,
        )

    def release(self, active: ActiveRequest) -> None:
        if isinstance(active, RelayRequest):
            if active.tail is not None:
                active.tail.abort()
            # how long its memory was taken: the last thing this worker reports
            active.span("relay-hold", active.begun_ns, time.monotonic_ns(), tokens=len(active.answer))
        super().release(active)
