"""The base of all workers: connections, the table of requests, cancelling, and forgetting what is over.

A request on a worker is one task. However it ends (done, failed, cancelled, gateway gone), `Worker._over` releases
everything, so there is one place to look when something leaks.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from workers.cache import BlockCache
from workers.engine import (
    BlockPool,
    EngineRunner,
    Generated,
    OutOfBlocks,
    PaceCounts,
    Sequence,
    Speculation,
)
from workers.environment import WorkerEnvironment
from workers.models import LoadedModel
from workers.roles.announcements import CacheNotices, local_facts
from workers.roles.request import (
    ActiveRequest,
    AnswerStream,
    Bounded,
    RequestFailed,
    engine_sampling,
    failure_of,
    logprobs_of,
)
from workers.wire.frames import Counters
from workers.wire.kv_receive import Receiver
from workers.wire.messages import (
    Cancel,
    Failed,
    Finish,
    Message,
    Prefill,
    Report,
    RequestSpec,
    Status,
    Without,
)
from workers.wire.peers import Peers
from workers.worker_records import PaceLog

log = logging.getLogger(__name__)


class Worker:
    """Base of the roles. Subclasses say what a request does (`serve`) and which messages they know (`handle`).

    A request whose route is this worker alone (`RequestSpec.alone`) is the same on every role: prefilled and decoded
    here. The pipeline `single` is that, and so is what is left when the others of a pipeline are lost.
    """

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
        expected = environment.serving.kv_bytes_per_token
        if expected not in (None, self.pool.bytes_per_token):
            raise ValueError(
                f"the scale is made for {expected} bytes of KV a token, and model {loaded.config.name} has "
                f"{self.pool.bytes_per_token}; write that as scale.kv_bytes_per_token.lab"
            )
        self.peers = Peers(
            local_facts(environment, loaded),
            environment.peers,
            self,
            receiver,
            environment.serving.kv_pool.connections,
            tails=environment.serving.handoff == "kv",
            warm_kv=environment.serving.kv_pool.warm,
        )
        self.notices = CacheNotices(self.peers, environment.role)
        self.cache = BlockCache(
            self.pool, loaded.fingerprint, self.notices.changed, keeps_unfilled=self.adopts_unfilled
        )
        speculative = environment.serving.speculative if environment.role == "main-decode" else None
        speculation = Speculation(speculative.ngram, speculative.draft) if speculative else None
        serving = environment.serving
        self.runner = EngineRunner(
            loaded,
            self.pool,
            cache=self.cache,
            speculation=speculation,
            profile=environment.profile,
            prompt_step=serving.kv_chunk if serving.kv_send == "chunked" else None,
        )
        self.answers = AnswerStream(self.peers, self.runner)
        self._pace_log: PaceLog | None = None
        if environment.profile is not None and environment.records is not None:
            self._pace_log = PaceLog(
                environment.records, environment.host, environment.profile, self._pace, environment.unwritten
            )
        self.active: dict[str, ActiveRequest] = {}
        self.ended = Bounded()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> Counters:
        return self.peers.local.counters

    async def start(self, listener: socket.socket | None) -> None:
        """Start the engine, accept on `listener`, dial whom this role dials."""
        self.runner.start()
        if self._pace_log is not None:
            self.spawn(self._pace_log.keep())
        await self.peers.start(listener)

    async def close(self) -> None:
        """End every request, connection and computation."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.close()
        await self.runner.close()
        if self._pace_log is not None:
            self._pace_log.write()

    def _pace(self) -> PaceCounts:
        counts = self.runner.pace
        assert counts is not None
        return counts

    # -- requests ----------------------------------------------------------------------------------------------

    def new_sequence(self, spec: RequestSpec, cached_blocks: int | None = None) -> Sequence:
        """A sequence of the prompt, to be computed here; or with its blocks now, for someone who writes those behind
        the `cached_blocks` that are here. Raises RequestFailed, MissingBlocks.
        """
        try:
            sampling = engine_sampling(spec.sampling)
            if cached_blocks is None:
                return self.runner.new_prompt(spec.id, spec.prompt, sampling)
            return self.runner.new_sequence(spec.id, spec.prompt, len(spec.prompt), sampling, cached_blocks)
        except OutOfBlocks as error:
            raise RequestFailed("out_of_kv_blocks", f"{self.environment.host}: {error}") from None
        except ValueError as error:
            raise RequestFailed("bad_request", f"{self.environment.host}: {error}") from None

    def begin_request(self, active: ActiveRequest) -> None:
        """Serve a request in a task of its own."""
        self.active[active.spec.id] = active
        active.task = self.spawn(self._run(active))
        active.task.add_done_callback(partial(self._over, active))

    def prefill_request(self, peer: str, spec: RequestSpec) -> None:
        """Begin a prompt's prefill for a gateway, and its answer as well if the route is this worker alone."""
        if spec.id in self.ended or spec.id in self.active:
            return
        try:
            self.begin_request(self.new_prefilling(spec))
        except RequestFailed as error:
            self.refuse(peer, spec.id, error)

    def new_prefilling(self, spec: RequestSpec) -> ActiveRequest:
        """A request that begins with prefill here. Raises RequestFailed."""
        if not spec.alone:
            raise RequestFailed("bad_request", f"{self.environment.host} has nobody to send KV to, but is asked to")
        return ActiveRequest(spec, self.new_sequence(spec))

    def refuse(self, gateway: str, request: str, failure: RequestFailed) -> None:
        """End a request here before it has begun."""
        self.ended[request] = True
        self.peers.post_if_up(gateway, Failed(request=request, error=failure.name, message=str(failure)[:4000]))
        self.peers.post_if_up(gateway, Report(request=request, spans=[], done=True))

    async def serve(self, active: ActiveRequest) -> None:
        """Serve one request of a pipeline as this role does; raising anything fails it."""
        raise NotImplementedError

    async def serve_alone(self, active: ActiveRequest) -> None:
        """Prefill and decode here."""
        first = await self.prefill(active)
        active.sequence.tokens.pop()  # prefill appended what decode_from_first appends and emits
        active.first_logprob = next(iter(logprobs_of(active, first)), None)
        await self.answers.decode_from_first(active, "decode", first.token_id, first.finish_reason)

    async def prefill(self, active: ActiveRequest) -> Generated:
        """Compute what the cache lacks of the prompt's KV, report the span; the first token."""
        sequence, start_ns = active.sequence, time.monotonic_ns()
        first = await self.runner.prefill(sequence)
        tokens = len(active.spec.prompt)
        active.span("prefill", start_ns, time.monotonic_ns(), tokens=tokens, cached=sequence.cached)
        self.answers.report(active)
        return first

    def release(self, active: ActiveRequest) -> None:
        """Give back what the request holds. Called once, however it ended."""
        self.runner.free(active.sequence)

    async def _run(self, active: ActiveRequest) -> None:
        spec, host = active.spec, self.environment.host
        try:
            async with asyncio.timeout(spec.deadline_s):
                await (self.serve_alone(active) if spec.alone else self.serve(active))
        except TimeoutError:
            active.failure = RequestFailed(
                "request_deadline", f"{host}: the request took longer than {spec.deadline_s:.0f} s"
            )
        except Exception as error:
            active.failure = failure_of(error, host)
            if active.failure.name == "internal_error":
                log.exception("request %s failed", spec.id)

    def _over(self, active: ActiveRequest, _: "asyncio.Task[None]") -> None:
        # a done callback, not a `finally`: a task that is cancelled before its first step never enters its body
        spec, failure = active.spec, active.failure
        try:
            self.release(active)
        except Exception as error:  # the gateway must hear of its end all the same
            log.exception("request %s was not released", spec.id)
            failure = failure or RequestFailed("internal_error", f"{self.environment.host}: {error}")
        self.active.pop(spec.id, None)
        self.ended[spec.id] = True
        if failure is not None:
            log.warning("request %s failed: %s: %s", spec.id, failure.name, failure)
            message = Failed(request=spec.id, error=failure.name, message=str(failure)[:4000])
            self.peers.post_if_up(spec.gateway, message)
        self.answers.report(active, done=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of this worker ended", exc_info=task.exception())

    # -- Handler -----------------------------------------------------------------------------------------------

    def handle(self, peer: str, message: Message) -> None:
        """Take a message that only this role knows."""
        log.warning("%s sent %s, which a %s does not expect", peer, type(message).__name__, self.environment.role)

    def on_cancel(self, request: str) -> None:
        """Note that a request is over, begun here or not."""

    def go_without(self, gateway: str, message: Without) -> None:
        """Note that a request that is not over here, perhaps not begun, loses one of its other workers."""

    def on_message(self, peer: str, message: Message) -> None:
        try:
            self._dispatch(peer, message)
        except Exception as error:
            request = message.spec.id if isinstance(message, Prefill) else getattr(message, "request", None)
            if request is None:
                raise
            # else it would cost the connection, and so everybody's requests
            log.exception("%s of %s about request %s failed", type(message).__name__, peer, request)
            failure = RequestFailed("internal_error", f"{self.environment.host}: {type(error).__name__}: {error}")
            if request in self.active:
                self.active[request].end(failure)
            elif isinstance(message, Prefill):
                self.refuse(peer, request, failure)

    def _dispatch(self, peer: str, message: Message) -> None:
        if isinstance(message, Cancel):
            self.ended[message.request] = True
            self.on_cancel(message.request)
            active = self.active.get(message.request)
            if active is not None:
                active.end()
            else:
                self.peers.post_if_up(peer, Report(request=message.request, spans=[], done=True))
        elif isinstance(message, Finish):
            finished = self.active.get(message.request)
            if finished is not None:
                finished.finished = True
                self.answers.stop(finished)
        elif isinstance(message, Prefill):
            self.prefill_request(peer, message.spec)
        elif isinstance(message, Without):
            if message.request not in self.ended:
                self.go_without(peer, message)
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
