"""Main decode's side of a hand-over: ids and KV of the relay's answer as they come, and their KV as it is computed.

Every wait for the relay is here, and has a deadline. Which mode does what with them is `main_decode.py`'s.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from workers.engine import EngineRunner, Generated, OutOfBlocks, Sequence
from workers.handover import IdConflict, Pace, RelayedIds
from workers.roles.incoming import DecodeRequest
from workers.roles.request import ActiveRequest, AnswerStream, RequestFailed
from workers.wire.deadlines import within
from workers.wire.kv_messages import KvTail
from workers.wire.kv_tail import token_views
from workers.wire.messages import Message, RequestSpec, TokenIds, Unheard, Without
from workers.wire.peers import Peers

log = logging.getLogger(__name__)


class Following:
    """Main decode's sequence while it follows the relay's: ids as they come, their KV computed, one token further.

    Behind the ids that were followed the sequence holds what was sampled after them: the relay's next tokens, if the
    relay is still decoding, or else the first of this worker's own.
    """

    def __init__(self, runner: EngineRunner, sequence: Sequence) -> None:
        self.relayed = RelayedIds(sequence.prompt_len)
        self.rounds: list[int] = []
        """Number of ids in each round so far."""
        self.relay_pace, self.own_pace = Pace(), Pace()
        self.ahead: list[Generated] = []
        """Tokens sampled behind those followed."""
        self._runner = runner
        self._sequence = sequence
        self._followed = 0
        self._news = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Number of ids that have come and were not followed yet."""
        return len(self.relayed.ids) - self._followed

    @property
    def agrees(self) -> bool:
        """Whether the sequence's answer and the relay's are the same as far as both go."""
        own = self._sequence.tokens[self._sequence.prompt_len :]
        return all(ours == theirs for ours, theirs in zip(own, self.relayed.ids, strict=False))

    def note(self) -> None:
        """Tell who waits that `relayed` has changed, or that KV has come."""
        self._news.set()

    async def news(self) -> None:
        """Return after the next `note`."""
        self._news.clear()
        await self._news.wait()

    async def follow(self) -> list[Generated]:
        """Compute the KV of all ids that have come, in one extend; returns the tokens sampled behind them, one or more.

        Tokens that were sampled here stand as long as the ids agree with them. Raises what the runner raises.
        """
        sequence, ids = self._sequence, self.relayed.ids[self._followed :]
        if not ids:
            return self.ahead
        at = sequence.prompt_len + self._followed
        own = sequence.tokens[at:]
        agreed = next((i for i, (ours, theirs) in enumerate(zip(own, ids, strict=False)) if ours != theirs), len(own))
        self._followed += len(ids)
        self.rounds.append(len(ids))
        if agreed > len(ids):  # sampled beyond them already
            self.ahead = self.ahead[len(ids) :]
            return self.ahead
        if agreed < min(len(own), len(ids)):
            self._runner.forget(sequence, at + agreed)
        rest = ids[agreed:]
        self.ahead = [await (self._runner.extend(sequence, rest) if rest else self._runner.prefill(sequence))]
        return self.ahead

    @property
    def may_guess(self) -> bool:
        """Whether there is a last token to go on from, and it does not end the answer."""
        return bool(self.ahead) and self._sequence.finish_reason is None and self._sequence.pending == 1

    async def guess(self) -> None:
        """Sample one token more, which the relay is making as well: nothing is left to compute when it stops there."""
        self.ahead.append(await self._runner.prefill(self._sequence))


class MainRequest(DecodeRequest):
    """A request on MD; the answer so far comes from the relay, or from the gateway when the relay is lost."""

    kv_event = "kv-transfer"  # across the WAN; the relay's comes over the fabric

    def __init__(self, spec: RequestSpec, sequence: Sequence, block_size: int, runner: EngineRunner) -> None:
        super().__init__(spec, sequence, block_size)
        self.asked_ns: int | None = None
        """Time at which the relay was asked to hand over; before that, nobody needs it."""
        self.following = Following(runner, sequence)
        self.overlapping = False
        """This worker decodes while the relay does."""
        self.behind = False
        """The relay has made tokens that are not made here: quicker to extend them all than to decode each."""
        self.told_to_stop = False
        """The relay was told to."""
        self.tail: int | None = 0
        """Generated tokens whose KV came from the relay; None: it is computed here."""


class HandOverReceiver:
    """Takes what comes of relayed answers for the requests of `active`, and waits for it. Wire's `TailReceiver`.

    `on_overlap` is told when a relay that decodes beside this worker has said something.
    """

    def __init__(
        self,
        host: str,
        peers: Peers,
        runner: EngineRunner,
        answers: AnswerStream,
        active: Mapping[str, ActiveRequest],
        on_overlap: Callable[[MainRequest], None],
    ) -> None:
        self.bytes_per_token = runner.pool.bytes_per_token
        self._host = host
        self._peers = peers
        self._runner = runner
        self._answers = answers
        self._active = active
        self._on_overlap = on_overlap

    # -- messages ----------------------------------------------------------------------------------------------

    def deliver(self, active: MainRequest, message: Message) -> None:
        """Take the relay's ids, or the gateway's word that the relay is lost."""
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
            active.end(RequestFailed(conflict.name, f"{self._host}: {conflict}"))
        following.note()
        if active.overlapping:
            self._on_overlap(active)

    def _without_relay(self, active: MainRequest, message: Without) -> None:
        """Go on from what the gateway has, or this worker, whichever is more. Raises IdConflict."""
        relayed = active.following.relayed
        if not active.overlapping:  # else this worker's own tokens are among them
            relayed.offer(relayed.start, message.ids)
        if not relayed.over or message.finish_reason is None:
            relayed.stop(time.monotonic_ns(), message.finish_reason, 0)
        if message.finish_reason is None:
            self._repeat(active, len(message.ids))

    def take_tail(self, peer: str, tail: KvTail, kv: memoryview) -> str | None:
        """Take KV of the relay's answer; returns why not, if it is not taken."""
        active = self._active.get(tail.request)
        if not isinstance(active, MainRequest) or active.tail is None or not active.arrived.done():
            return f"request {tail.request} does not wait for KV on {self._host}"
        if peer != active.spec.relay or tail.position != active.sequence.prompt_len + active.tail:
            return f"KV of {peer} from position {tail.position} on is not the next of request {tail.request}"
        try:
            write_tail(self._runner, active.sequence, tail.position, tail.tokens, kv)
        except OutOfBlocks as error:
            return f"{self._host}: {error}"
        active.tail += tail.tokens
        active.following.note()
        return None

    # -- waiting -----------------------------------------------------------------------------------------------

    async def more(self, active: MainRequest, relay: str) -> None:
        """Wait for more of the relay; if it cannot be heard in time, for the gateway's word. Raises RequestFailed."""
        # an answer that is nearly over may finish on the relay first, so the relay always has something to send
        try:
            await self._news(active, relay)
        except TimeoutError:
            reply_s = self._peers.known[relay].path.reply_s
            await self.ask_gateway(active, relay, f"{relay} sent no token ids within {reply_s:.1f} s")

    async def _news(self, active: MainRequest, peer: str, *, stall: bool = False) -> None:
        """Wait for the next that is said of a request. Raises TimeoutError after the reply or stall deadline of `peer`,
        counted from when no part of anything long has come from it or gone to it.
        """
        path = self._peers.known[peer].path
        async with within(lambda: path.stall_s if stall else path.reply_s, lambda: self._peers.bulk_moved(peer)):
            await active.following.news()

    async def ask_gateway(self, active: MainRequest, relay: str, reason: str) -> None:
        """Wait for the gateway's word in place of the relay's. Raises RequestFailed."""
        self._unheard(active, reason)
        gateway, relayed = active.spec.gateway, active.following.relayed
        try:
            while not relayed.over:
                await self._news(active, gateway)
        except TimeoutError:
            gateway_s = self._peers.known[gateway].path.reply_s
            raise RequestFailed(
                "handover_deadline",
                f"{self._host}: no token ids from {relay}, nor within {gateway_s:.1f} s from the gateway",
            ) from None

    async def await_tail(self, active: MainRequest, relay: str) -> None:
        """Wait for the KV that the relay has announced, as long as it keeps coming and the relay does not give up."""
        relayed, start_ns = active.following.relayed, time.monotonic_ns()
        try:
            while active.tail is not None and active.tail < relayed.tail:
                await self._news(active, relay, stall=True)
        except TimeoutError:
            stall_s = self._peers.known[relay].path.stall_s
            log.info("request %s: no KV of the answer came within %.1f s; computing it", active.spec.id, stall_s)
        came = min(active.tail or 0, len(relayed.ids) - 1)
        active.sequence.computed = active.sequence.prompt_len + came
        active.span("kv-tail", start_ns, time.monotonic_ns(), peer=relay, tokens=came)

    def _unheard(self, active: MainRequest, reason: str) -> None:
        relay = active.spec.relay or ""
        self._peers.post_if_up(active.spec.gateway, Unheard(request=active.spec.id, peer=relay, reason=reason[:4000]))

    def _repeat(self, active: MainRequest, known: int) -> None:
        """Send the gateway what the relay said last: it was lost, and it may be known here and to nobody else."""
        relayed = active.following.relayed
        answer, finish = active.answer, active.sequence.finish_reason or relayed.finish_reason
        if len(answer) < len(relayed.ids):  # not extended yet
            answer, finish = relayed.ids, relayed.finish_reason
        if len(answer) <= known:
            return
        if active.spec.sampling.logprobs is not None:  # of which the relay's are lost
            active.end(RequestFailed("relay_lost", f"{active.spec.relay} was lost before all it said was heard"))
            return
        self._answers.emit(active, active.sequence.prompt_len + known, answer[known:], finish, [])

    def lost(self, peer: str, reason: str) -> None:
        """Note that a relay was lost: what it was asked for will not come."""
        for active in self._active.values():
            if not isinstance(active, MainRequest) or active.spec.relay != peer or active.asked_ns is None:
                continue
            relayed = active.following.relayed
            if not relayed.over:
                self._unheard(active, f"{peer} was lost before the hand-over: {reason}")
            elif relayed.tail:  # it will not come any more
                relayed.tail = 0
                active.following.note()


def write_tail(runner: EngineRunner, sequence: Sequence, position: int, tokens: int, kv: memoryview) -> None:
    """Put the KV of positions [position, position + tokens) into the sequence's blocks. Raises OutOfBlocks.

    The sequence is not being computed, and `computed` stays as it is.
    """
    runner.reserve(sequence, position + tokens)
    start = 0
    for view in token_views(runner.pool, sequence.blocks, position, position + tokens):
        view[:] = kv[start : start + len(view)]
        start += len(view)
    size = runner.pool.block_size
    runner.pool.store(sequence.blocks[position // size : -(-(position + tokens) // size)])
