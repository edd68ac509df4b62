"""Prefill (P): computes the prompt's KV, samples the first token, sends both to the decode workers of the route."""

import asyncio
import time

from workers.roles.worker import Active, RequestFailed, Worker
from workers.wire.frames import WireError
from workers.wire.kv_send import OutgoingKv, TransferAborted
from workers.wire.messages import Failed, Message, Prefill


class Prefilling(Active):
    """A request on P: `outgoing` are the transfers that read its blocks."""

    outgoing: tuple[OutgoingKv, ...] = ()


class PrefillWorker(Worker):
    """Serves the `prefill` role; with a route of neither relay nor main it decodes as well (the control)."""

    def handle(self, peer: str, message: Message) -> None:
        if not isinstance(message, Prefill):
            return super().handle(peer, message)
        spec = message.spec
        if spec.id in self.ended or spec.id in self.active:
            return None
        try:
            active = Prefilling(spec, self.new_sequence(spec))
        except RequestFailed as error:
            self.peers.post_if_up(peer, Failed(request=spec.id, error=error.name, message=str(error)))
            return None
        return self.begin_request(active)

    async def serve(self, active: Active) -> None:
        assert isinstance(active, Prefilling)
        spec, sequence = active.spec, active.sequence
        start_ns = time.monotonic_ns()
        first = await self.runner.prefill(sequence)
        active.span("prefill", start_ns, time.monotonic_ns(), tokens=len(spec.prompt))
        self.report(active)
        targets = [name for name in (spec.relay, spec.main) if name is not None]
        active.outgoing = tuple(
            OutgoingKv(spec, self.pool, sequence.blocks, first.token_id, first.finish_reason) for _ in targets
        )
        # Tasks of their own: cancelling the request must not cut a frame in half, only detach it from the blocks.
        deliveries = [
            self.spawn(self._deliver(active, kv, name)) for kv, name in zip(active.outgoing, targets, strict=True)
        ]
        if deliveries:
            await asyncio.wait(deliveries)
        else:
            sequence.tokens.pop()  # prefill appended what decode_from_first appends and emits
            await self.decode_from_first(active, "decode", first.token_id, first.finish_reason)

    async def _deliver(self, active: Prefilling, kv: OutgoingKv, name: str) -> None:
        spec = active.spec
        try:
            delivered = await kv.deliver(self.peers.pools[name])
        except TransferAborted:
            return
        except WireError as error:
            # The other delivery goes on: whether the answer can be had from it is the gateway's decision.
            message = f"KV to {name}: {error}"
            self.peers.post_if_up(spec.gateway, Failed(request=spec.id, error=error.name, message=message[:4000]))
            return
        active.span(
            self._transfer_name(name),
            delivered.start_ns,
            delivered.received_ns,
            peer=name,
            bytes=delivered.kv_bytes,
            tokens=len(spec.prompt),
            queue_ns=delivered.queue_ns,
        )
        self.report(active)

    def _transfer_name(self, peer: str) -> str:
        here = self.environment.datacenter
        return "fabric-transfer" if self.peers.known[peer].datacenter == here else "wan-transfer"

    def release(self, active: Active) -> None:
        assert isinstance(active, Prefilling)
        for kv in active.outgoing:
            kv.abort("the request is over")
        super().release(active)
