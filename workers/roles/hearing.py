"""What main decode hears of a request's answer: ids and KV from the relay, or the gateway's word when it is lost.

Every wait for the relay is here, and has a deadline. What is done with what is heard is `main_decode.py`'s.
"""

import logging
import time

from workers.engine import OutOfBlocks, Sequence
from workers.environment import WorkerEnvironment
from workers.handover import IdConflict
from workers.models import LoadedModel
from workers.roles.active import RequestFailed
from workers.roles.decode import DecodeWorker, Decoding
from workers.roles.handover import Following, write_tail
from workers.wire.deadlines import within
from workers.wire.messages import KvTail, Message, RequestSpec, TokenIds, Unheard, Without

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


class Hearing(DecodeWorker):
    """The part of the main decode worker that listens. Implements wire's `TailReceiver`."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        super().__init__(environment, loaded)
        self.peers.tail_receiver = self

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> MainDecoding:
        return MainDecoding(spec, sequence, self)

    def more_heard(self, active: MainDecoding) -> None:
        """The relay, which is still decoding as this worker is, has said something."""
        raise NotImplementedError

    # -- messages ----------------------------------------------------------------------------------------------

    def handle(self, peer: str, message: Message) -> None:
        if isinstance(message, TokenIds):
            return self.deliver_or_keep(message.request, message)
        return super().handle(peer, message)

    def deliver(self, active: MainDecoding, message: Message) -> None:
        assert isinstance(message, TokenIds | Without)
        following, relayed = active.following, active.following.relayed
        try:
            if isinstance(message, Without):
                self._without_relay(active, message)
            else:
                relayed.offer(message.position, message.ids)
                following.relay_pace.note(time.monotonic_ns(), len(message.ids))
                if message.stopped_ns is not None:
                    relayed.stop(message.stopped_ns, message.finish_reason, message.tail)
        except IdConflict as conflict:
            active.end(RequestFailed(conflict.name, f"{self.environment.host}: {conflict}"))
        following.note()
        if active.overlapping:
            self.more_heard(active)

    def _without_relay(self, active: MainDecoding, message: Without) -> None:
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

    # -- waiting -----------------------------------------------------------------------------------------------

    async def hear(self, active: MainDecoding, relay: str) -> None:
        """Wait for more of the relay; if it cannot be heard in time, for the gateway's word. Raises RequestFailed."""
        # an answer that is nearly over may finish on the relay first, so the relay always has something to send
        try:
            await self._news(active, relay)
        except TimeoutError:
            reply_s = self.peers.known[relay].path.reply_s
            await self.ask_gateway(active, relay, f"{relay} sent no token ids within {reply_s:.1f} s")

    async def _news(self, active: MainDecoding, peer: str, *, stall: bool = False) -> None:
        """The next that is heard of a request: within the reply deadline, or the stall deadline, of `peer`, counted
        from when no part of anything long has come from it or gone to it. Raises TimeoutError.
        """
        path = self.peers.known[peer].path
        async with within(lambda: path.stall_s if stall else path.reply_s, lambda: self.peers.bulk_moved(peer)):
            await active.following.news()

    async def ask_gateway(self, active: MainDecoding, relay: str, reason: str) -> None:
        self._unheard(active, reason)
        gateway, relayed = active.spec.gateway, active.following.relayed
        try:
            while not relayed.over:
                await self._news(active, gateway)
        except TimeoutError:
            gateway_s = self.peers.known[gateway].path.reply_s
            raise RequestFailed(
                "handover_deadline",
                f"{self.environment.host}: no token ids from {relay}, nor within {gateway_s:.1f} s from the gateway",
            ) from None

    async def await_tail(self, active: MainDecoding, relay: str) -> None:
        """Wait for the KV that the relay has announced, as long as it keeps coming and the relay does not give up."""
        relayed, start_ns = active.following.relayed, time.monotonic_ns()
        try:
            while active.tail is not None and active.tail < relayed.tail:
                await self._news(active, relay, stall=True)
        except TimeoutError:
            stall_s = self.peers.known[relay].path.stall_s
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
