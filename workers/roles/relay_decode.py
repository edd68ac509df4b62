"""Relay decode (RLD): answers at once over the fabric, until main decode holds the KV and takes over."""

import time

from workers.engine import Sequence
from workers.roles.decode import DecodeWorker, Decoding
from workers.roles.worker import Active
from workers.wire.messages import HandOver, Message, RequestSpec, TokenIds


class Relaying(Decoding):
    """A request on RLD. `asked_ns`: when main decode asked for it."""

    asked_ns: int | None = None


class RelayDecodeWorker(DecodeWorker):
    """Serves the `relay-decode` role. One-shot hand-over: stop at once, then all token ids in one message."""

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> Relaying:
        return Relaying(spec, sequence, self)

    def handle(self, peer: str, message: Message) -> None:
        if isinstance(message, HandOver):
            return self.deliver_or_keep(message.request, message)
        return super().handle(peer, message)

    def deliver(self, active: Relaying, message: Message) -> None:
        active.asked_ns = time.monotonic_ns()
        self.stop_decoding(active)

    async def serve(self, active: Active) -> None:
        assert isinstance(active, Relaying)
        spec, sequence = active.spec, active.sequence
        first, finish = await active.arrived
        if active.asked_ns is None:
            await self.decode_from_first(active, "relay-decode", first, finish)
        else:  # main decode had the KV sooner than this worker: one token, and on to the hand-over
            active.begin_decode("relay-decode")
            sequence.tokens.append(first)
            self.emit_first(active, first, finish)
        active.end_decode()
        stopped_ns = time.monotonic_ns()
        if spec.main is not None:
            # Also when the answer ended here: main decode keeps the turn for the next one.
            finish = sequence.finish_reason or finish or ("stop" if active.finished else None)
            ids = TokenIds(request=spec.id, ids=active.answer, stopped_ns=stopped_ns, finish_reason=finish)
            self.peers.post(spec.main, ids)
        if active.asked_ns is not None:
            active.span("relay-stop", active.asked_ns, stopped_ns)
