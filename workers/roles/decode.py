"""What relay decode and main decode share: a prompt's KV, from the cache and from the wire, in a sequence's blocks.

A transfer brings the blocks that prefill believes this worker's cache lacks; those before them are adopted, and so
pinned, when it begins. If they are not all there it is refused with what is. If it breaks off, what has arrived stays
for a while, prefill is told where to go on, and the next transfer of the same request continues.
"""

import asyncio
import logging
from functools import partial
from typing import Any

import msgspec

from workers.cache import MissingBlocks
from workers.engine import Sequence
from workers.environment import WorkerEnvironment
from workers.events import Teller
from workers.models import LoadedModel
from workers.roles.active import Active, Bounded, RequestFailed
from workers.roles.worker import Worker
from workers.wire.deadlines import Timer
from workers.wire.kv_encoding import Fp8
from workers.wire.kv_receive import RefuseTransfer
from workers.wire.messages import KvBegin, KvWanted, Message, RequestSpec, TokenLogprob, Without
from workers.wire.stream import Target

log = logging.getLogger(__name__)

BROKEN = ("connection_lost", "deadline_exceeded")  # a transfer's ends that another one can mend


class Decoding(Active):
    """A request on a decode worker. `kv_event` is what timelines are told of its KV's coming in; None: nothing."""

    kv_event: str | None = None

    def __init__(self, spec: RequestSpec, sequence: Sequence, worker: "DecodeWorker") -> None:
        super().__init__(spec, sequence)
        self.worker = worker
        self.held_blocks = sequence.computed // worker.pool.block_size
        """So many of the prompt's blocks are here, adopted or received."""
        self.incoming: Incoming | None = None
        self.cancelled = False
        self.arrived: asyncio.Future[tuple[int, str | None]] = asyncio.get_running_loop().create_future()
        """First token and its finish reason, once the whole prompt's KV is in the blocks."""

    def detach(self) -> None:
        """From now on no byte from the wire reaches the blocks."""
        self.cancelled = True
        if self.incoming is not None:
            self.incoming.stop()
        if not self.arrived.done():
            self.arrived.cancel()


class Incoming:
    """One transfer for a request: the wire's `IncomingKv`. A later one for the same request takes its place."""

    def __init__(self, active: Decoding, transfer: str, attempt: int) -> None:
        self.transfer = transfer
        self.attempt = attempt
        self.cancelled = False
        self._active = active
        self._pool = active.worker.pool
        self._target: Target | None = None
        self._waiting: Timer | None = None
        self._arrived_blocks = 0
        self._copy_ns = 0
        self._expected_blocks = self._pool.blocks_for(len(active.spec.prompt)) - active.held_blocks

    def views(self, first_block: int, tokens: list[int]) -> list[memoryview]:
        blocks = self._active.sequence.blocks[first_block : first_block + len(tokens)]
        return [self._pool.room(block, count) for block, count in zip(blocks, tokens, strict=True)]

    def attach(self, target: Target | None) -> None:
        self._target = target

    def verified(self, blocks: int) -> None:
        if self.cancelled:
            return
        held = self._active.held_blocks
        self._copy_ns += self._pool.store(self._active.sequence.blocks[held : held + blocks])
        self._active.held_blocks += blocks
        self._arrived_blocks += blocks
        if self._active.kv_event is not None:
            fraction = min(1.0, self._arrived_blocks / max(1, self._expected_blocks))
            self._active.worker.teller.tell(self._active.kv_event, request=self._active.spec.id, fraction=fraction)

    def complete(
        self, first_token: int, finish_reason: str | None, received_ns: int, first_logprob: TokenLogprob | None
    ) -> None:
        active = self._active
        if not self.cancelled and not active.arrived.done():  # done: cancelled in this very turn of the loop
            if first_token >= active.worker.vocab:  # the engine's whole batch would fail on it
                self.failed("bad_frame", f"first token {first_token} is outside the vocabulary")
                return
            active.sequence.computed = len(active.spec.prompt)
            active.worker.runner.keep(active.sequence)
            active.first_logprob = first_logprob
            if self._copy_ns:
                active.note_copies(self._copy_ns, self._arrived_blocks * self._pool.block_size)
            active.arrived.set_result((first_token, finish_reason))

    def failed(self, error: str, reason: str) -> None:
        if self.cancelled:
            return
        failure = RequestFailed(error, f"{self._active.worker.environment.host}: {reason}")
        if error in BROKEN:
            self._wait_for_more(failure)
        else:
            self._active.end(failure)

    def stop(self) -> None:
        """From now on this transfer changes nothing."""
        self.cancelled = True
        if self._target is not None:
            self._target.detach()
        if self._waiting is not None:
            self._waiting.cancel()

    def want_more(self) -> None:
        """Tell prefill from where on blocks are wanted. It tries again by itself when it has lost this worker."""
        spec = self._active.spec
        wanted = KvWanted(request=spec.id, first_block=self._active.held_blocks, transfer=self.transfer)
        self._active.worker.peers.post_if_up(spec.prefill, wanted)

    def _wait_for_more(self, failure: RequestFailed) -> None:
        active, peers = self._active, self._active.worker.peers
        path = peers.known[active.spec.prefill].path
        self.want_more()
        self._waiting = Timer(
            lambda: path.connect_s + path.reply_s,
            partial(active.end, failure),
            lambda: peers.bulk_moved(active.spec.prefill),
        )


class RoomQueue:
    """Transfers that there was no room for, first come, first served."""

    def __init__(self) -> None:
        self.waiting: dict[str, KvBegin] = {}
        """By request, the transfer that was refused."""

    @property
    def first(self) -> KvBegin | None:
        """Who is next."""
        return next(iter(self.waiting.values()), None)

    def join(self, begin: KvBegin) -> None:
        """Wait; a request that waits already keeps its place, with its newer transfer."""
        known = self.waiting.get(begin.spec.id)
        if known is None or known.attempt < begin.attempt:
            self.waiting[begin.spec.id] = begin

    def leave(self, request: str) -> KvBegin | None:
        """Wait no longer."""
        return self.waiting.pop(request, None)


class DecodeWorker(Worker):
    """Base of both decode roles. Implements wire's `Receiver`."""

    adopts_unfilled = False  # the sender says how many whole blocks to adopt

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        super().__init__(environment, loaded, receiver=self)
        self.block_size = self.pool.block_size
        self.vocab = loaded.config.vocab
        self.bytes_per_token = self.pool.bytes_per_token
        fp8 = Fp8(loaded.config.kv_shape, self.pool.storage.dtype)
        self.peers.kv_encodings = {fp8.name: fp8}
        self.teller = Teller()
        # What others say of a request whose KV has not begun to arrive: their way here may be the faster one.
        self._early = Bounded()
        self.room = RoomQueue()
        self.runner.on_room = self._offer_room

    def begin(self, begin: KvBegin) -> Incoming:
        spec = begin.spec
        if spec.id in self.ended:
            raise RefuseTransfer("cancelled", f"request {spec.id} is over on {self.environment.host}")
        if spec.prefill not in self.peers.known:
            raise RefuseTransfer("bad_request", f"{spec.prefill}, prefill of {spec.id}, is no peer of this worker")
        active = self.active.get(spec.id)
        if active is None:
            active = self.begin_or_queue(begin)
        elif isinstance(active, Decoding):
            self._check_continues(active, begin)
        else:
            raise RefuseTransfer("duplicate_transfer", f"request {spec.id} is served alone here")
        active.incoming = Incoming(active, begin.transfer, begin.attempt)
        return active.incoming

    def begin_or_queue(self, begin: KvBegin) -> "Decoding":
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
        """Blocks have come back, and nobody who computes here waits for any: let in who waits, in their order."""
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
            active.incoming = Incoming(active, begin.transfer, begin.attempt)
            active.incoming.want_more()

    def leave_queue(self, request: str) -> KvBegin | None:
        """The request wants no room any more; its refused transfer, if it had waited for some."""
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

    def _check_continues(self, active: "Decoding", begin: KvBegin) -> None:
        """Let another transfer go on where an earlier one of the same request broke off. Raises RefuseTransfer."""
        if active.incoming is None or active.arrived.done() or active.cancelled:
            raise RefuseTransfer("duplicate_transfer", f"KV of request {active.spec.id} is here already")
        if begin.transfer == active.incoming.transfer or begin.attempt < active.incoming.attempt:
            raise RefuseTransfer("duplicate_transfer", f"transfer {active.incoming.transfer} is arriving already")
        # The sender knows better whether the earlier one is dead: its end of a broken connection may be seen first.
        active.incoming.stop()
        if begin.first_block > active.held_blocks:
            raise RefuseTransfer(
                "kv_missing", f"{self.environment.host} has {active.held_blocks} blocks", active.held_blocks
            )
        active.held_blocks = begin.first_block

    def _begin_decoding(self, begin: KvBegin) -> Decoding:
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

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> Decoding:
        """The role's own kind of request."""
        raise NotImplementedError

    def deliver(self, active: Any, message: Message) -> None:
        """Another decode worker's message for a request that is here, or the gateway's that this one is lost."""
        raise NotImplementedError

    def deliver_or_keep(self, request: str, message: Message) -> None:
        """Deliver now, or when the request begins; drop it when the request is over."""
        active = self.active.get(request)
        if isinstance(active, Decoding):
            self.deliver(active, message)
        elif active is not None:
            log.warning("%s about request %s, which is served here alone, is ignored", type(message).__name__, request)
        elif request not in self.ended:
            self._early[request] = [*self._early.get(request, []), message]

    def early(self, request: str) -> list[Message]:
        """What others have said of a request that has not begun here."""
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
        elif isinstance(active, Decoding) and not active.arrived.done():
            active.end(failure)

    def release(self, active: Active) -> None:
        if isinstance(active, Decoding):
            active.detach()
        super().release(active)
