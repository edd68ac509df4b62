"""KV transfers that come in for requests of a decode worker, and those that wait for room.

If a transfer breaks off, what has arrived stays for a while, prefill is told where to go on, and the next transfer of
the same request continues.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from workers.engine import BlockPool, EngineRunner, Sequence
from workers.events import Teller
from workers.roles.request import ActiveRequest, RequestFailed
from workers.wire.deadlines import Timer
from workers.wire.kv_messages import KvBegin, KvWanted
from workers.wire.kv_receive import RefuseTransfer
from workers.wire.messages import RequestSpec, TokenLogprob
from workers.wire.peers import Peers
from workers.wire.stream import Target

BROKEN = ("connection_lost", "deadline_exceeded")  # a transfer's ends that another one can mend


class DecodeRequest(ActiveRequest):
    """A request on a decode worker. `kv_event` is what timelines are told of its KV's coming in; None: nothing."""

    kv_event: str | None = None

    def __init__(self, spec: RequestSpec, sequence: Sequence, block_size: int) -> None:
        super().__init__(spec, sequence)
        self.held_blocks = sequence.computed // block_size
        """Number of the prompt's first blocks that are here, adopted or received."""
        self.incoming: IncomingTransfer | None = None
        self.cancelled = False
        self.arrived: asyncio.Future[tuple[int, str | None]] = asyncio.get_running_loop().create_future()
        """First token and its finish reason, once the whole prompt's KV is in the blocks."""

    def detach(self) -> None:
        """Let no byte from the wire reach the blocks from now on."""
        self.cancelled = True
        if self.incoming is not None:
            self.incoming.stop()
        if not self.arrived.done():
            self.arrived.cancel()

    def check_continues(self, begin: KvBegin, host: str) -> None:
        """Let another transfer go on where an earlier one broke off. Raises RefuseTransfer."""
        if self.incoming is None or self.arrived.done() or self.cancelled:
            raise RefuseTransfer("duplicate_transfer", f"KV of request {self.spec.id} is here already")
        if begin.transfer == self.incoming.transfer or begin.attempt < self.incoming.attempt:
            raise RefuseTransfer("duplicate_transfer", f"transfer {self.incoming.transfer} is arriving already")
        # The sender knows better whether the earlier one is dead: its end of a broken connection may be seen first.
        self.incoming.stop()
        if begin.first_block > self.held_blocks:
            raise RefuseTransfer("kv_missing", f"{host} has {self.held_blocks} blocks", self.held_blocks)
        self.held_blocks = begin.first_block


@dataclass(frozen=True, slots=True)
class Intake:
    """The parts of a worker that an incoming transfer touches."""

    host: str
    vocab: int
    pool: BlockPool
    runner: EngineRunner
    peers: Peers
    teller: Teller


class IncomingTransfer:
    """A transfer for a request: the wire's `IncomingKv`. A later one for the same request takes its place."""

    def __init__(self, intake: Intake, active: DecodeRequest, begin: KvBegin) -> None:
        self.transfer = begin.transfer
        self.attempt = begin.attempt
        self.cancelled = False
        self._intake = intake
        self._active = active
        self._pool = intake.pool
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
            self._intake.teller.tell(self._active.kv_event, request=self._active.spec.id, fraction=fraction)

    def complete(
        self, first_token: int, finish_reason: str | None, received_ns: int, first_logprob: TokenLogprob | None
    ) -> None:
        active = self._active
        if not self.cancelled and not active.arrived.done():  # done: cancelled in this very turn of the loop
            if first_token >= self._intake.vocab:  # the engine's whole batch would fail on it
                self.failed("bad_frame", f"first token {first_token} is outside the vocabulary")
                return
            active.sequence.computed = len(active.spec.prompt)
            self._intake.runner.keep(active.sequence)
            active.first_logprob = first_logprob
            if self._copy_ns:
                active.note_copies(self._copy_ns, self._arrived_blocks * self._pool.block_size)
            active.arrived.set_result((first_token, finish_reason))

    def failed(self, error: str, reason: str) -> None:
        if self.cancelled:
            return
        failure = RequestFailed(error, f"{self._intake.host}: {reason}")
        if error in BROKEN:
            self._wait_for_more(failure)
        else:
            self._active.end(failure)

    def stop(self) -> None:
        """Let this transfer change nothing from now on."""
        self.cancelled = True
        if self._target is not None:
            self._target.detach()
        if self._waiting is not None:
            self._waiting.cancel()

    def want_more(self) -> None:
        """Tell prefill from where on blocks are wanted. It tries again by itself when it has lost this worker."""
        spec = self._active.spec
        wanted = KvWanted(request=spec.id, first_block=self._active.held_blocks, transfer=self.transfer)
        self._intake.peers.post_if_up(spec.prefill, wanted)

    def _wait_for_more(self, failure: RequestFailed) -> None:
        active, peers = self._active, self._intake.peers
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
        """The refused transfers, by request."""

    @property
    def first(self) -> KvBegin | None:
        """The transfer that is next."""
        return next(iter(self.waiting.values()), None)

    def join(self, begin: KvBegin) -> None:
        """Wait; a request that waits already keeps its place, with its newer transfer."""
        known = self.waiting.get(begin.spec.id)
        if known is None or known.attempt < begin.attempt:
            self.waiting[begin.spec.id] = begin

    def leave(self, request: str) -> KvBegin | None:
        """Wait no longer."""
        return self.waiting.pop(request, None)
