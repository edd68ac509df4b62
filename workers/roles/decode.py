"""The base of relay decode and main decode: a prompt's KV, from the cache and from the wire, in a sequence's blocks.

A transfer brings the blocks that prefill believes this worker's cache lacks; those before them are adopted, and so
pinned, when it begins. If they are not all there it is refused with what is.
"""

import logging
from typing import Any

import msgspec

from workers.cache import MissingBlocks
from workers.engine import Sequence
from workers.environment import WorkerEnvironment
from workers.events import Teller
from workers.models import LoadedModel
from workers.roles.incoming import DecodeRequest, IncomingTransfer, Intake, RoomQueue
from workers.roles.request import ActiveRequest, Bounded, RequestFailed
from workers.roles.worker import Worker
from workers.wire.kv_encoding import Fp8
from workers.wire.kv_messages import KvBegin
from workers.wire.kv_receive import RefuseTransfer
from workers.wire.messages import Message, RequestSpec, Without

log = logging.getLogger(__name__)


class DecodeWorker(Worker):
    """Base of both decode roles. Implements wire's `Receiver`."""

    adopts_unfilled = False  # the sender says how many whole blocks to adopt

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        super().__init__(environment, loaded, receiver=self)
        self.block_size = self.pool.block_size
        self.bytes_per_token = self.pool.bytes_per_token
        fp8 = Fp8(loaded.config.kv_shape, self.pool.storage.dtype)
        self.peers.kv_encodings = {fp8.name: fp8}
        self.intake = Intake(environment.host, loaded.config.vocab, self.pool, self.runner, self.peers, Teller())
        self._early = Bounded()
        """Messages of others about requests whose KV has not begun to arrive: their way here may be the faster one."""
        self.room = RoomQueue()
        self.runner.on_room = self._offer_room

    def begin(self, begin: KvBegin) -> IncomingTransfer:
        spec = begin.spec
        if spec.id in self.ended:
            raise RefuseTransfer("cancelled", f"request {spec.id} is over on {self.environment.host}")
        if spec.prefill not in self.peers.known:
            raise RefuseTransfer("bad_request", f"{spec.prefill}, prefill of {spec.id}, is no peer of this worker")
        active = self.active.get(spec.id)
        if active is None:
            active = self.begin_or_queue(begin)
        elif isinstance(active, DecodeRequest):
            active.check_continues(begin, self.environment.host)
        else:
            raise RefuseTransfer("duplicate_transfer", f"request {spec.id} is served alone here")
        active.incoming = IncomingTransfer(self.intake, active, begin)
        return active.incoming

    def begin_or_queue(self, begin: KvBegin) -> DecodeRequest:
        """First come, first served; whoever computes here and waits for room came before. Raises RefuseTransfer."""
        spec = begin.spec
        if not self.room.waiting and not self.runner.short_of_blocks:
            try:
                return self._begin_decoding(begin)
            except RefuseTransfer as refusal:
                if refusal.error != "out_of_kv_blocks":
                    raise
        needed = self.pool.blocks_for(len(spec.prompt))
        if needed > self.pool.num_blocks:
            reason = f"{needed} KV blocks needed, and there are {self.pool.num_blocks}"
            raise RefuseTransfer("out_of_kv_blocks", f"{self.environment.host}: {reason}")
        self.room.join(begin)
        raise RefuseTransfer("kv_later", f"{self.environment.host} has no room for {needed} KV blocks yet")

    def _offer_room(self) -> None:
        """Let in who waits, in their order: blocks have come back, and nobody who computes here waits for any."""
        while (begin := self.room.first) is not None:
            held = self.cache.policy.match(self.cache.hashes(begin.spec.prompt))
            first_block = min(begin.first_block, held)
            try:
                active = self._begin_decoding(msgspec.structs.replace(begin, first_block=first_block))
            except RefuseTransfer as refusal:
                if refusal.error == "out_of_kv_blocks":
                    return
                self.room.leave(begin.spec.id)
                self.refuse(begin.spec.gateway, begin.spec.id, RequestFailed(refusal.error, str(refusal)))
                continue
            self.room.leave(begin.spec.id)
            active.incoming = IncomingTransfer(self.intake, active, begin)
            active.incoming.want_more()

    def leave_queue(self, request: str) -> KvBegin | None:
        """Let a request wait for room no longer; returns its refused transfer, if it had waited for some."""
        begin = self.room.leave(request)
        if begin is not None:
            self.runner.look_for_room()
        return begin

    def on_cancel(self, request: str) -> None:
        self.leave_queue(request)

    def on_lost(self, peer: str, reason: str) -> None:
        super().on_lost(peer, reason)
        for begin in list(self.room.waiting.values()):
            if peer == begin.spec.gateway:
                self.leave_queue(begin.spec.id)

    def _begin_decoding(self, begin: KvBegin) -> DecodeRequest:
        spec = begin.spec
        try:
            active = self.new_active(spec, self.new_sequence(spec, begin.first_block))
        except MissingBlocks as missing:
            raise RefuseTransfer("kv_missing", f"{self.environment.host}: {missing}", missing.held) from None
        except RequestFailed as error:
            raise RefuseTransfer(error.name, str(error)) from None
        self.begin_request(active)
        for message in self._early.pop(spec.id, []):
            self.deliver(active, message)
        return active

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> DecodeRequest:
        """Make the role's own kind of request."""
        raise NotImplementedError

    def deliver(self, active: Any, message: Message) -> None:
        """Take another decode worker's message for a request that is here, or the gateway's that this one is lost."""
        raise NotImplementedError

    def deliver_or_keep(self, request: str, message: Message) -> None:
        """Deliver now, or when the request begins; drop it when the request is over."""
        active = self.active.get(request)
        if isinstance(active, DecodeRequest):
            self.deliver(active, message)
        elif active is not None:
            log.warning("%s about request %s, which is served here alone, is ignored", type(message).__name__, request)
        elif request not in self.ended:
            self._early[request] = [*self._early.get(request, []), message]

    def early(self, request: str) -> list[Message]:
        """Messages of others about a request that has not begun here."""
        return list(self._early.get(request, []))

    def go_without(self, gateway: str, message: Without) -> None:
        lost = self.peers.known.get(message.lost)
        if lost is None or lost.role != "prefill":
            self.deliver_or_keep(message.request, message)
            return
        active = self.active.get(message.request)
        failure = RequestFailed("prefill_lost", f"{message.lost} was lost before {self.environment.host} had its KV")
        if active is None:
            self.leave_queue(message.request)
            self._early.pop(message.request, None)
            self.refuse(gateway, message.request, failure)
        elif isinstance(active, DecodeRequest) and not active.arrived.done():
            active.end(failure)

    def release(self, active: ActiveRequest) -> None:
        if isinstance(active, DecodeRequest):
            active.detach()
        super().release(active)
