"""Relay decode (RLD): answers at once over the fabric, until main decode holds the KV and takes over."""

import logging
import time

from workers.engine import Sequence
from workers.roles.active import Active
from workers.roles.decode import DecodeWorker, Decoding
from workers.wire.frames import WireError
from workers.wire.messages import HandOver, Message, RequestSpec, TokenIds, Without

log = logging.getLogger(__name__)


class Relaying(Decoding):
    """A request on RLD. `asked_ns`: when main decode asked for it. `main_lost`: nobody will take it over."""

    asked_ns: int | None = None
    main_lost = False


class RelayDecodeWorker(DecodeWorker):
    """Serves the `relay-decode` role. One-shot hand-over: stop at once, then all token ids in one message."""

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> Relaying:
        return Relaying(spec, sequence, self)

    def handle(self, peer: str, message: Message) -> None:
        if isinstance(message, HandOver):
            return self.deliver_or_keep(message.request, message)
        return super().handle(peer, message)

    def deliver(self, active: Relaying, message: Message) -> None:
        if isinstance(message, Without):
            active.main_lost = True
        elif not active.main_lost:
            active.asked_ns = time.monotonic_ns()
            self.stop_decoding(active)

    async def serve(self, active: Active) -> None:
        assert isinstance(active, Relaying)
        sequence = active.sequence
        first, finish = await active.arrived
        if active.asked_ns is None:
            await self.decode_from_first(active, "relay-decode", first, finish)
        else:  # main decode had the KV sooner than this worker: one token, and on to the hand-over
            active.begin_decode("relay-decode")
            sequence.tokens.append(first)
            sequence.finish_reason = finish  # type: ignore[assignment]
            self.emit_first(active, first, finish)
        active.end_decode()
        stopped_ns = time.monotonic_ns()
        if active.asked_ns is not None:
            active.span("relay-stop", active.asked_ns, stopped_ns)
        finish = sequence.finish_reason or ("stop" if active.finished else None)
        if not self._hand_over(active, stopped_ns, finish) and finish is None:
            active.begin_decode("relay-decode", inherited=len(active.answer))
            await self.decode(active)

    def _hand_over(self, active: Relaying, stopped_ns: int, finish: str | None) -> bool:
        """Give main decode the ids, also of an answer that ended here: it keeps the turn for the next one.

        False when there is nobody to take over: the answer goes on here.
        """
        main = active.spec.main
        if main is None or active.main_lost:
            return False
        ids = TokenIds(
            request=active.spec.id,
            position=active.sequence.prompt_len,
            ids=active.answer,
            stopped_ns=stopped_ns,
            finish_reason=finish,
        )
        try:
            self.peers.post(main, ids)
        except WireError as error:
            log.info("request %s goes on here: %s", active.spec.id, error)
            return False
        return True
