"""Requests on their way: started, merged, recovered when workers are lost, cancelled, recorded. Knows no HTTP."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial

from workers.environment import WorkerEnvironment
from workers.gateway.attempts import Attempt, LiveRequest, Read, Taken
from workers.gateway.merge import MergeConflict
from workers.gateway.recovery import REQUEST_DEADLINE_S, Recovery
from workers.gateway.routing import Router
from workers.models import LoadedModel
from workers.policy import Route
from workers.records import RecordWriter, RequestLog
from workers.roles.announcements import local_facts
from workers.roles.request import RequestFailed
from workers.wire.deadlines import Timer
from workers.wire.frames import WireError
from workers.wire.messages import (
    CacheNotice,
    Cancel,
    Failed,
    Finish,
    Message,
    Prefill,
    Report,
    RequestSpec,
    SamplingSpec,
    Status,
    StopRelay,
    Tokens,
    Undelivered,
    Unheard,
)
from workers.wire.peers import Peers

log = logging.getLogger(__name__)

SETTLE_S = 30.0  # after that, and a round trip: for the workers to say that they hold nothing more


class Dispatcher(Recovery):
    """The gateway's side of the wire. `Handler` of its connections."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        self.environment = environment
        self.loaded = loaded
        self.peers = Peers(local_facts(environment, loaded), environment.peers, self, None, 0)
        self.router = Router(environment, loaded, self.peers)
        self.live: dict[str, LiveRequest] = {}
        self.attempts: dict[str, tuple[LiveRequest, Attempt]] = {}
        self._records = RecordWriter(environment.records, environment.unwritten, environment.records_limit_bytes)
        self.submitting = asyncio.Lock()
        """Held while a request is submitted, and until others have had their turn."""
        self.on_settled: Callable[[RequestLog], None] = lambda _: None
        """Told of every request when its log is complete."""

    async def start(self) -> None:
        """Dial every worker."""
        await self.peers.start(None)

    async def close(self) -> None:
        for request in list(self.live.values()):
            self._settle(request)
        await self.peers.close()
        self._records.close()

    # -- use ---------------------------------------------------------------------------------------------------

    def route_now(self) -> Route:
        """The route a request that no cache knows would take, with every role there. Raises NoRoute."""
        return self.router.whole_route()

    def submit(self, prompt: list[int], sampling: SamplingSpec, prefix: str, read: Read) -> LiveRequest:
        """Choose a route and start. `read` makes text of the tokens as they come. Raises NoRoute."""
        avoid: set[str] = set()
        spec: RequestSpec | None = None
        while spec is None:
            route = self.router.route(prompt, self.live.values(), avoid)
            spec = RequestSpec(
                id=f"{prefix}-{secrets.token_hex(12)}",
                gateway=self.environment.host,
                prefill=route.prefill,
                relay=route.relay,
                main=route.main,
                prompt=prompt,
                sampling=sampling,
                deadline_s=REQUEST_DEADLINE_S,
            )
            if not self.ask(spec):
                avoid.add(route.prefill)
                spec = None
        handoff, name = self.environment.serving.handoff, self.loaded.config.name
        entry = RequestLog(spec.id, name, route, len(prompt), handoff, time.time(), time.monotonic_ns())
        entry.roles = {peer.name: peer.role for peer in self.peers.known.values()}
        request = LiveRequest(Attempt(spec, route), entry, read)
        self.live[spec.id] = request
        self.attempts[spec.id] = request, request.attempt
        request.deadline = asyncio.get_running_loop().call_later(REQUEST_DEADLINE_S, self._expire, request)
        return request

    async def taken(self, request: LiveRequest) -> AsyncGenerator[Taken, None]:
        """The answer in order, exactly once. Raises RequestFailed. Leaving early cancels the request everywhere."""
        try:
            while True:
                item = await request.queue.get()
                if isinstance(item, RequestFailed):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self.cancel(request, "the client has gone")

    def cancel(self, request: LiveRequest, reason: str) -> None:
        """End a request here, and what it does on every worker. Nothing happens when it is over already."""
        if request.over:
            return
        self._end(request, None, f"cancelled: {reason}")
        self.cancel_workers(request, reason)

    # -- Handler -----------------------------------------------------------------------------------------------

    def on_message(self, peer: str, message: Message) -> None:
        if isinstance(message, Status):
            return
        if isinstance(message, CacheNotice):
            self.router.noticed(peer, message)
            return
        if not isinstance(message, Tokens | Report | Failed | Undelivered | Unheard):
            log.warning("%s sent %s, which a gateway does not expect", peer, type(message).__name__)
            return
        request, attempt = self.attempts.get(message.request, (None, None))
        if request is None or attempt is None:
            return
        try:
            self._heard(request, attempt, peer, message)
        except Exception as error:  # else it would cost the connection, and so everybody's requests
            log.exception("%s of %s about request %s failed", type(message).__name__, peer, message.request)
            self.fail(request, RequestFailed("internal_error", f"the gateway: {type(error).__name__}: {error}"))

    def _heard(
        self,
        request: LiveRequest,
        attempt: Attempt,
        peer: str,
        message: Tokens | Report | Failed | Undelivered | Unheard,
    ) -> None:
        if isinstance(message, Tokens):
            self._take(request, attempt, peer, message)
        elif isinstance(message, Report):
            request.log.spans += [(peer, span) for span in message.spans]
            if message.done:
                self._done(request, attempt, peer)
        elif isinstance(message, Failed):
            self.lose(request, attempt, peer, RequestFailed(message.error, message.message))
        elif isinstance(message, Undelivered):
            self.peers.post_if_up(message.peer, Cancel(request=attempt.spec.id, reason=message.message))
            self.lose(request, attempt, message.peer, RequestFailed(message.error, message.message))
        else:
            self.take_over(request, attempt, message)

    def on_lost(self, peer: str, reason: str) -> None:
        self.router.lost(peer)
        failure = RequestFailed("worker_lost", f"{peer} was lost: {reason}")
        for request in list(self.live.values()):
            for attempt in list(request.attempts):
                if peer in attempt.unsettled:
                    self.lose(request, attempt, peer, failure)
                    self._done(request, attempt, peer)

    def on_change(self) -> None:
        self.somebody_is_back()

    def status_for(self, peer: str) -> None:
        return None

    # -- the answer --------------------------------------------------------------------------------------------

    def _take(self, request: LiveRequest, attempt: Attempt, peer: str, message: Tokens) -> None:
        if request.over or attempt is not request.attempt:
            return
        try:
            ready = request.merge.offer(message.position, message.ids, message.finish_reason, peer, message.logprobs)
        except MergeConflict as conflict:
            self.diverged(request, attempt, peer, RequestFailed(conflict.name, str(conflict)))
            return
        if not ready:
            return
        try:
            finish_reason = request.note(ready)
        except Exception as error:  # a fault in making text of it is this request's alone
            log.exception("request %s: no text can be made of its tokens", request.spec.id)
            self.fail(request, RequestFailed("internal_error", f"{type(error).__name__}: {error}"))
            return
        relay = attempt.spec.relay
        if attempt.unheard and peer == attempt.spec.main and relay is not None and attempt.works(relay):
            # both decode, and main decode is ahead now
            self.peers.post_if_up(relay, Cancel(request=attempt.spec.id, reason=f"{peer} has taken over"))
        elif attempt.overtaken_by(peer, self.environment.serving.handoff) and relay is not None:
            self.peers.post_if_up(relay, StopRelay(request=attempt.spec.id))
        if finish_reason is not None:
            self._end(request, finish_reason, None)
            if not request.merge.finished:  # only the gateway sees a stop string
                for worker in sorted(attempt.unsettled):
                    self.peers.post_if_up(worker, Finish(request=attempt.spec.id))

    def _done(self, request: LiveRequest, attempt: Attempt, worker: str) -> None:
        attempt.unsettled.discard(worker)
        if not request.over:
            self.check_hope(request, attempt)
        elif not request.unsettled:
            self._settle(request)

    # -- inside ------------------------------------------------------------------------------------------------

    def ask(self, spec: RequestSpec) -> bool:
        """Whether the worker that prefills is there to hear of it."""
        try:
            self.peers.post(spec.prefill, Prefill(spec=spec))
        except WireError as error:
            log.info("request %s: %s", spec.id, error)
            return False
        return True

    def fail(self, request: LiveRequest, failure: RequestFailed) -> None:
        if request.over:
            return
        self._end(request, None, f"{failure.name}: {failure}")
        request.queue.put_nowait(failure)
        self.cancel_workers(request, failure.name)

    def _end(self, request: LiveRequest, finish_reason: str | None, error: str | None) -> None:
        request.over = True
        request.log.end_ns = time.monotonic_ns()
        request.log.finish_reason = finish_reason
        request.log.error = error
        if request.stranded is not None:
            request.stranded.cancel()
            request.stranded = None
        if finish_reason is not None and self.environment.serving.end_on_rld and request.ended_on_relay:
            self.cancel_workers(request, "the answer ended on the relay")
        # Workers may still be busy with it (KV on its way to main decode): their reports complete the record.
        if not request.unsettled:
            self._settle(request)

    def cancel_workers(self, request: LiveRequest, reason: str) -> None:
        for attempt in request.attempts:
            for worker in sorted(attempt.unsettled):
                self.peers.post_if_up(worker, Cancel(request=attempt.spec.id, reason=reason[:4000]))

    def _expire(self, request: LiveRequest) -> None:
        self.fail(request, RequestFailed("request_deadline", f"no answer within {REQUEST_DEADLINE_S:.0f} s"))
        if request.spec.id in self.live:  # a worker that never reports must not keep the request for ever
            request.deadline = Timer(self._settle_s, partial(self._settle, request))

    def _settle_s(self) -> float:
        """How long a worker's report may take, over the longest link that is."""
        paths = [peer.path for peer in self.peers.known.values()]
        return SETTLE_S + max((path.rtt_s + path.queue_s for path in paths), default=0.0)

    def _settle(self, request: LiveRequest) -> None:
        if self.live.pop(request.spec.id, None) is None:
            return
        for attempt in request.attempts:
            self.attempts.pop(attempt.spec.id, None)
        if request.deadline is not None:
            request.deadline.cancel()
        request.log.unsettled = tuple(sorted(request.unsettled))
        if request.unsettled:
            self.cancel_workers(request, "the request is over")
        self._records.write(request.log.record())
        self.on_settled(request.log)
