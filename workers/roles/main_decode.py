"""Main decode (MD): takes the prompt's KV over the WAN, the answer's token ids from the relay, and goes on."""

import logging
import time

from workers.engine import Generated, OutOfBlocks, Sequence
from workers.environment import WorkerEnvironment
from workers.handover import SMALL_GAP, close_enough, overtakes
from workers.models import LoadedModel
from workers.roles.decode import DecodeWorker
from workers.roles.request import ActiveRequest, logprobs_of
from workers.roles.takeover import HandOverReceiver, MainRequest
from workers.wire.frames import WireError
from workers.wire.messages import HandOver, Message, RequestSpec, StopRelay, TokenIds

log = logging.getLogger(__name__)


class MainDecodeWorker(DecodeWorker):
    """Serves the `main-decode` role. The modes of hand-over are told in workers/handover.py."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        super().__init__(environment, loaded)
        self.answers.on_emit = self._emitted
        self.relay = HandOverReceiver(
            environment.host, self.peers, self.runner, self.answers, self.active, self._relay_went_on
        )
        self.peers.tail_receiver = self.relay

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> MainRequest:
        return MainRequest(spec, sequence, self.block_size, self.runner)

    def handle(self, peer: str, message: Message) -> None:
        if isinstance(message, TokenIds):
            return self.deliver_or_keep(message.request, message)
        return super().handle(peer, message)

    def deliver(self, active: MainRequest, message: Message) -> None:
        self.relay.deliver(active, message)

    def on_lost(self, peer: str, reason: str) -> None:
        super().on_lost(peer, reason)
        self.relay.lost(peer, reason)

    async def serve(self, active: ActiveRequest) -> None:
        assert isinstance(active, MainRequest)
        first, finish = await active.arrived
        if active.spec.relay is None:
            await self.answers.decode_from_first(active, "main-decode", first, finish)
        else:
            await self._take_over(active, active.spec.relay, first, finish)

    async def _take_over(self, active: MainRequest, relay: str, first: int, finish: str | None) -> None:
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
            await self.answers.decode_from_first(active, "main-decode", first, finish)
            return
        if relayed.tail:
            await self.relay.await_tail(active, relay)
        active.tail = None
        extend_ns = time.monotonic_ns()
        recomputed = max(0, active.sequence.prompt_len + len(relayed.ids) - active.sequence.computed)
        tokens = await following.follow()
        if relayed.finish_reason is not None or active.finished:  # in `overlap`, where it had not stopped
            await self._complete_cache(active)
            return
        done_ns, inherited, rounds = time.monotonic_ns(), len(relayed.ids), len(following.rounds)
        active.span("hand-over", ready_ns, ids_ns, peer=relay, tokens=inherited, rounds=rounds)
        if relayed.stopped_ns is not None:
            active.span("relay-stopped", relayed.stopped_ns, relayed.stopped_ns, peer=relay)
        active.span("extend", extend_ns, done_ns, tokens=recomputed)
        self.answers.report(active)
        active.begin_decode("main-decode", inherited)
        await self._go_on(active, tokens)

    async def _ask(self, active: MainRequest, relay: str) -> None:
        """Ask the relay to hand over; return when it, or the gateway in its place, has said something."""
        active.asked_ns = time.monotonic_ns()
        relayed = active.following.relayed
        if relayed.over:
            return
        try:
            self.peers.post(relay, HandOver(request=active.spec.id, mode=self.environment.serving.handoff))
        except WireError as error:
            await self.relay.ask_gateway(active, relay, str(error))
            return
        while not relayed.ids and not relayed.over:
            await self.relay.more(active, relay)

    async def _catch_up(self, active: MainRequest, relay: str) -> None:
        """Round after round, as long as the relay goes on; in `overlap` only until the gap is small.

        Once the relay is being told to stop, this worker does not wait for its ids but guesses them.
        """
        following, relayed = active.following, active.following.relayed
        overlap = self.environment.serving.handoff == "overlap"
        while not relayed.over:
            if following.waiting:
                await following.follow()
            elif active.told_to_stop and following.may_guess:
                await following.guess()
            else:
                await self.relay.more(active, relay)
            if not close_enough(following.rounds, following.waiting):
                continue
            if overlap:
                return
            self._stop_relay(active)

    async def _go_on(self, active: MainRequest, tokens: list[Generated]) -> None:
        """Emit what follows the relay's ids, and decode to the end; while both decode, skip what the relay has made."""
        relayed, sequence = active.following.relayed, active.sequence
        active.overlapping = not relayed.over
        while True:
            active.behind = False
            for token in tokens:
                self.answers.emit(
                    active, token.position, [token.token_id], token.finish_reason, logprobs_of(active, token)
                )
            if tokens[-1].finish_reason is None:
                await self.answers.decode(active)
            ended = sequence.finish_reason is not None or relayed.finish_reason is not None or active.finished
            if ended or not active.behind:
                break
            tokens = await active.following.follow()
            while active.following.waiting > SMALL_GAP:  # come meanwhile: the step's own token was the relay's already
                active.following.own_pace.note(time.monotonic_ns())
                tokens = await active.following.follow()
            active.begin_decode("main-decode", len(active.answer) - len(tokens))
        if active.overlapping and relayed.finish_reason is not None:
            await self._complete_cache(active)

    def _stop_relay(self, active: MainRequest) -> None:
        if not active.told_to_stop and active.spec.relay is not None:
            active.told_to_stop = True
            self.peers.post_if_up(active.spec.relay, StopRelay(request=active.spec.id))

    def _relay_went_on(self, active: MainRequest) -> None:
        """Follow the end of the answer, ids that are not made here yet, or how fast the relay is."""
        following, relayed = active.following, active.following.relayed
        if relayed.finish_reason is not None:
            if following.agrees:
                self.answers.stop(active)
            return
        if len(relayed.ids) > len(active.answer) + SMALL_GAP and following.agrees:
            active.behind = True
            self.answers.stop(active)
        if relayed.over:
            return
        relay, relay_itl, own_itl = active.spec.relay, following.relay_pace.itl_ns, following.own_pace.itl_ns
        if relay is None or relay_itl is None or own_itl is None:
            return
        if not overtakes(relay_itl, own_itl, self.peers.known[relay].path.now.rtt_ns):
            self._stop_relay(active)

    def _emitted(self, active: ActiveRequest, count: int) -> None:
        if isinstance(active, MainRequest) and active.overlapping:
            active.following.own_pace.note(time.monotonic_ns(), count)

    async def _complete_cache(self, active: MainRequest) -> None:
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
