"""What relay decode and main decode share: taking a prompt's KV from the wire into the blocks of a sequence."""

import asyncio
from typing import Any

from workers.engine import Sequence
from workers.environment import WorkerEnvironment
from workers.models import LoadedModel
from workers.roles.worker import Active, Bounded, RequestFailed, Worker
from workers.wire.kv_receive import RefuseTransfer
from workers.wire.messages import KvBegin, Message, RequestSpec
from workers.wire.stream import Target


class Decoding(Active):
    """A request on a decode worker; the sink (`IncomingKv`) of its prompt's KV."""

    def __init__(self, spec: RequestSpec, sequence: Sequence, worker: "DecodeWorker") -> None:
        super().__init__(spec, sequence)
        self._worker = worker
        self._target: Target | None = None
        self.arrived: asyncio.Future[tuple[int, str | None]] = asyncio.get_running_loop().create_future()
        """First token and its finish reason, once the whole prompt's KV is in the blocks."""
        self.cancelled = False

    def views(self, first_block: int, tokens: list[int]) -> list[memoryview]:
        blocks = self.sequence.blocks[first_block : first_block + len(tokens)]
        return [self._worker.pool.view(block, count) for block, count in zip(blocks, tokens, strict=True)]

    def attach(self, target: Target | None) -> None:
        self._target = target

    def complete(self, first_token: int, finish_reason: str | None, received_ns: int) -> None:
        if not self.arrived.done():  # done: cancelled in this very turn of the loop
            self.sequence.computed = len(self.spec.prompt)
            self.arrived.set_result((first_token, finish_reason))

    def failed(self, error: str, reason: str) -> None:
        if not self.cancelled:
            self.end(RequestFailed(error, f"{self._worker.environment.host}: {reason}"))

    def detach(self) -> None:
        """From now on no byte from the wire reaches the blocks."""
        self.cancelled = True
        if self._target is not None:
            self._target.detach()
        if not self.arrived.done():
            self.arrived.cancel()


class DecodeWorker(Worker):
    """Base of both decode roles. Implements wire's `Receiver`."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        super().__init__(environment, loaded, receiver=self)
        self.block_size = self.pool.block_size
        self.bytes_per_token = self.pool.bytes_per_token
        # What other workers say of a request whose KV has not begun to arrive: their way here may be the faster one.
        self._early = Bounded()

    def begin(self, begin: KvBegin) -> Decoding:
        spec = begin.spec
        if spec.id in self.ended:
            raise RefuseTransfer("cancelled", f"request {spec.id} is over on {self.environment.host}")
        if spec.id in self.active:
            raise RefuseTransfer("duplicate_transfer", f"KV of request {spec.id} is arriving already")
        try:
            active = self.new_active(spec, self.new_sequence(spec))
        except RequestFailed as error:
            raise RefuseTransfer(error.name, str(error)) from None
        self.begin_request(active)
        early = self._early.pop(spec.id, None)
        if early is not None:
            self.deliver(active, early)
        return active

    def new_active(self, spec: RequestSpec, sequence: Sequence) -> Decoding:
        """The role's own kind of request."""
        raise NotImplementedError

    def deliver(self, active: Any, message: Message) -> None:
        """Another decode worker's message for a request that is here."""
        raise NotImplementedError

    def deliver_or_keep(self, request: str, message: Message) -> None:
        """Deliver now, or when the request begins; drop it when the request is over."""
        active = self.active.get(request)
        if active is not None:
            self.deliver(active, message)
        elif request not in self.ended:
            self._early[request] = message

    def release(self, active: Active) -> None:
        assert isinstance(active, Decoding)
        active.detach()
        super().release(active)
