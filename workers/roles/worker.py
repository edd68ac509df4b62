"""What all workers share: connections, the table of requests, cancelling, and forgetting what is over.

A request on a worker is one task. However it ends (done, failed, cancelled, gateway gone), `Worker._over` releases
everything, so there is one place to look when something leaks.
"""

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Coroutine
from functools import partial
from typing import Any

from workers.cache import BlockCache
from workers.engine import BlockPool, EngineRunner, Generated, OutOfBlocks, Sampling, Sequence
from workers.environment import WorkerEnvironment
from workers.models import LoadedModel
from workers.roles.notices import Notices
from workers.wire.connection import Local
from workers.wire.counters import Counters
from workers.wire.frames import PROTOCOL_VERSION, WireError
from workers.wire.kv_receive import Receiver
from workers.wire.messages import (
    Cancel,
    Facts,
    Failed,
    Finish,
    Message,
    Report,
    RequestSpec,
    SamplingSpec,
    Span,
    Status,
    TokenLogprob,
    Tokens,
)
from workers.wire.peers import Peers

log = logging.getLogger(__name__)

REMEMBERED = 8192  # ended requests a worker can still tell from unknown ones


class RequestFailed(Exception):
    """A request cannot go on here; `name` is the error that clients and records see."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Bounded(OrderedDict[str, Any]):
    """A dictionary that forgets its oldest entries."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > REMEMBERED:
            self.popitem(last=False)


class Active:
    """One request on one worker, while it lasts."""

    def __init__(self, spec: RequestSpec, sequence: Sequence) -> None:
        self.spec = spec
        self.sequence = sequence
        self.spans: list[Span] = []
        self.failure: RequestFailed | None = None
        self.task: asyncio.Task[None] | None = None
        self.decoding = False
        self.first_logprob: TokenLogprob | None = None
        """Of the first token, when the request asks for log probabilities; prefill sampled it."""
        self.finished = False
        """The gateway wants no more tokens; the request goes on for the caches' sake."""
        self._decode: tuple[str, int, int] | None = None

    @property
    def answer(self) -> list[int]:
        """Token ids generated so far."""
        return self.sequence.tokens[self.sequence.prompt_len :]

    def span(self, name: str, start_ns: int, end_ns: int, **details: Any) -> None:
        """Note a stretch of this request's life; the next report carries it."""
        self.spans.append(Span(name=name, start_ns=start_ns, end_ns=end_ns, **details))

    def begin_decode(self, name: str, inherited: int = 0) -> None:
        """From now on tokens are this worker's, after `inherited` ones; `end_decode` notes the span."""
        self._decode = (name, time.monotonic_ns(), inherited)

    def end_decode(self) -> None:
        """Idempotent: by the last token, by a stop, or by neither."""
        if self._decode is not None:
            name, start_ns, inherited = self._decode
            self._decode = None
            self.span(name, start_ns, time.monotonic_ns(), tokens=len(self.answer) - inherited)

    def end(self, failure: RequestFailed | None = None) -> None:
        """Stop now: cancelled, or failed with a name."""
        self.failure = self.failure or failure
        if self.task is not None:
            self.task.cancel()


def engine_sampling(spec: SamplingSpec) -> Sampling:
    """The engine's form of a request's sampling."""
    return Sampling(
        max_tokens=spec.max_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        seed=spec.seed,
        ignore_eos=spec.ignore_eos,
        stop_token_ids=tuple(spec.stop_token_ids),
        logprobs=spec.logprobs,
    )


def logprobs_of(active: Active, token: Generated) -> list[TokenLogprob]:
    """Of a token just sampled, as `emit` takes them; empty when the request does not ask for log probabilities."""
    if active.spec.sampling.logprobs is None or token.logprob is None:
        return []
    return [TokenLogprob(token.logprob, list(token.top_logprobs or ()))]


def local_facts(environment: WorkerEnvironment, loaded: LoadedModel) -> Local:
    """This worker as it introduces itself."""
    facts = Facts(
        name=environment.host,
        role=environment.role,
        protocol=PROTOCOL_VERSION,
        model=loaded.config.name,
        fingerprint=loaded.fingerprint,
        block_size=environment.serving.block_size,
        kv_shape=list(loaded.config.kv_shape),
        kv_dtype=loaded.spec.dtype,
    )
    return Local(facts, environment.secret)


class Worker:
    """Base of the roles. Subclasses say what a request does (`serve`) and which messages they know (`handle`)."""

    adopts_unfilled = True
    """Whether new sequences here can begin with a part of a block."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel, receiver: Receiver | None = None) -> None:
        self.environment = environment
        self.pool = BlockPool.for_budget(
            loaded.config,
            environment.kv_bytes,
            environment.serving.block_size,
            loaded.spec.dtype,
            loaded.spec.device,
        )
        self.peers = Peers(
            local_facts(environment, loaded), environment.peers, self, receiver, environment.serving.kv_connections
        )
        self.notices = Notices(self.peers, environment.role)
        self.cache = BlockCache(
            self.pool, loaded.fingerprint, self.notices.changed, keeps_unfilled=self.adopts_unfilled
        )
        self.runner = EngineRunner(loaded, self.pool, cache=self.cache)
        self.active: dict[str, Active] = {}
        self.ended = Bounded()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> Counters:
        return self.peers.local.counters

    async def start(self, listener: socket.socket | None) -> None:
        """Start the engine, accept on `listener`, dial whom this role dials."""
        self.runner.start()
        await self.peers.start(listener)

    async def close(self) -> None:
        """End every request, connection and computation."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.close()
        await self.runner.close()

    # -- requests ----------------------------------------------------------------------------------------------

    def new_sequence(self, spec: RequestSpec, cached_blocks: int | None = None) -> Sequence:
        """Reserve blocks for the prompt behind those adopted (`EngineRunner.new_sequence`).

        Raises RequestFailed, MissingBlocks.
        """
        try:
            sampling = engine_sampling(spec.sampling)
            return self.runner.new_sequence(spec.id, spec.prompt, len(spec.prompt), sampling, cached_blocks)
        except OutOfBlocks as error:
            raise RequestFailed("out_of_kv_blocks", f"{self.environment.host}: {error}") from None
        except ValueError as error:
            raise RequestFailed("bad_request", f"{self.environment.host}: {error}") from None

    def begin_request(self, active: Active) -> None:
        """Serve a request in a task of its own."""
        self.active[active.spec.id] = active
        active.task = self.spawn(self._run(active))
        active.task.add_done_callback(partial(self._over, active))

    async def serve(self, active: Active) -> None:
        """What this role does for one request; raising anything fails it."""
        raise NotImplementedError

    def release(self, active: Active) -> None:
        """Give back what the request holds. Called once, however it ended."""
        self.runner.free(active.sequence)

    async def _run(self, active: Active) -> None:
        spec, host = active.spec, self.environment.host
        try:
            async with asyncio.timeout(spec.deadline_s):
                await self.serve(active)
        except TimeoutError:
            active.failure = RequestFailed(
                "request_deadline", f"{host}: the request took longer than {spec.deadline_s:.0f} s"
            )
        except (RequestFailed, WireError) as error:
            active.failure = RequestFailed(error.name, str(error))
        except OutOfBlocks as error:
            active.failure = RequestFailed("out_of_kv_blocks", f"{host}: {error}")
        except Exception as error:
            log.exception("request %s failed", spec.id)
            active.failure = RequestFailed("internal_error", f"{host}: {type(error).__name__}: {error}")

    def _over(self, active: Active, _: "asyncio.Task[None]") -> None:
        # a done callback, not a `finally`: a task that is cancelled before its first step never enters its body
        spec, failure = active.spec, active.failure
        self.release(active)
        self.active.pop(spec.id, None)
        self.ended[spec.id] = True
        if failure is not None:
            log.warning("request %s failed: %s: %s", spec.id, failure.name, failure)
            message = Failed(request=spec.id, error=failure.name, message=str(failure)[:4000])
            self.peers.post_if_up(spec.gateway, message)
        self.report(active, done=True)

    def report(self, active: Active, *, done: bool = False) -> None:
        """Tell the gateway what has been noted since the last report."""
        spans, active.spans = active.spans, []
        self.peers.post_if_up(active.spec.gateway, Report(request=active.spec.id, spans=spans, done=done))

    def emit(
        self,
        active: Active,
        position: int,
        ids: list[int],
        finish_reason: str | None,
        logprobs: list[TokenLogprob],
    ) -> None:
        """Stream tokens to the gateway, all spans before the last one. Raises WireError when it is not there."""
        if finish_reason is not None:
            active.end_decode()
            self.report(active)
        self.peers.post(
            active.spec.gateway,
            Tokens(request=active.spec.id, position=position, ids=ids, finish_reason=finish_reason, logprobs=logprobs),
        )

    def emit_first(self, active: Active, first: int, finish_reason: str | None) -> None:
        """Stream the token that prefill sampled."""
        logprobs = [active.first_logprob] if active.first_logprob is not None else []
        self.emit(active, active.sequence.prompt_len, [first], finish_reason, logprobs)

    async def decode(self, active: Active) -> None:
        """Decode to the end, or until the sequence is stopped, streaming each token."""
        if not active.finished:
            active.decoding = True
            async for token in self.runner.decode(active.sequence):
                self.emit(active, token.position, [token.token_id], token.finish_reason, logprobs_of(active, token))
            active.decoding = False
        active.end_decode()

    def stop_decoding(self, active: Active) -> None:
        """No further token after the step in flight; `decode` returns."""
        if active.decoding and active.sequence.finish_reason is None:
            self.spawn(self.runner.stop(active.sequence))

    async def decode_from_first(self, active: Active, name: str, first: int, finish_reason: str | None) -> None:
        """Emit the token that prefill sampled, then decode unless it ended the answer."""
        sequence = active.sequence
        active.begin_decode(name)
        sequence.tokens.append(first)
        sequence.finish_reason = finish_reason  # type: ignore[assignment]
        self.emit_first(active, first, finish_reason)
        if finish_reason is None:
            await self.decode(active)

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- Handler -----------------------------------------------------------------------------------------------

    def handle(self, peer: str, message: Message) -> None:
        """A message that only this role knows."""
        log.warning("%s sent %s, which a %s does not expect", peer, type(message).__name__, self.environment.role)

    def on_message(self, peer: str, message: Message) -> None:
        if isinstance(message, Cancel):
            self.ended[message.request] = True
            active = self.active.get(message.request)
            if active is not None:
                active.end()
            else:
                self.peers.post_if_up(peer, Report(request=message.request, spans=[], done=True))
        elif isinstance(message, Finish):
            finished = self.active.get(message.request)
            if finished is not None:
                finished.finished = True
                self.stop_decoding(finished)
        else:
            self.handle(peer, message)

    def on_lost(self, peer: str, reason: str) -> None:
        for active in list(self.active.values()):
            if active.spec.gateway == peer:
                active.end()

    def on_change(self) -> None:
        self.notices.introduce(self.cache.names)
        for peer in self.peers.known.values():
            status = self.status_for(peer.name)
            if status is not None:
                self.peers.post_if_up(peer.name, status)

    def status_for(self, peer: str) -> Status | None:
        known = self.peers.known.get(peer)
        if known is None or known.role != "gateway":
            return None
        return Status(
            free_blocks=self.pool.free_count,
            blocks=self.pool.num_blocks,
            cached_blocks=self.cache.policy.evictable,
            requests=len(self.active),
            connected=self.peers.connected(),
            counters=self.peers.local.counters.rows(),
        )
