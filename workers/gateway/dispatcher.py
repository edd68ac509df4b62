"""The gateway's side of the wire: submits requests to workers, and takes what these say of them. Knows no HTTP.

Ends of requests are `live_requests.py`'s, lost workers `recovery.py`'s.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator

from workers.environment import WorkerEnvironment
from workers.gateway.attempts import Attempt, LiveRequest, Read, Taken
from workers.gateway.live_requests import REQUEST_DEADLINE_S, LiveRequests
from workers.gateway.merge import MergeConflict
from workers.gateway.recovery import Recovery
from workers.gateway.routing import Router
from workers.models import LoadedModel
from workers.policy import Route
from workers.records import RecordWriter, RequestLog
from workers.roles.announcements import local_facts
from workers.roles.request import RequestFailed
from workers.wire.messages import (
    CacheNotice,
    Cancel,
    Failed,
    Finish,
    Message,
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


class Dispatcher:
    """The gateway's side of the wire. `Handler` of its connections."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        self.environment = environment
        self.loaded = loaded
        self.peers = Peers(local_facts(environment, loaded), environment.peers, self, None, 0)
        self.router = Router(environment, loaded, self.peers)
        self._records = RecordWriter(environment.records, environment.unwritten, environment.records_limit_bytes)
        self.live = LiveRequests(self.peers, self._records, environment.serving.end_on_rld)
        self._handoff = environment.serving.handoff
        self._recovery = Recovery(self.peers, self.router, self.live, self._handoff)
        self.submitting = asyncio.Lock()
        """Held while a request is submitted, and until others have had their turn."""

    async def start(self) -> None:
        """Dial every worker."""
        await self.peers.start(None)

    async def close(self) -> None:
        self.live.settle_all()
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
            route = self.router.route(prompt, self.live, avoid)
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
            if not self.live.ask(spec):
                avoid.add(route.prefill)
                spec = None
        name = self.loaded.config.name
        entry = RequestLog(spec.id, name, route, len(prompt), self._handoff, time.time(), time.monotonic_ns())
        entry.roles = {peer.name: peer.role for peer in self.peers.known.values()}
        request = LiveRequest(Attempt(spec, route), entry, read)
        self.live.add(request)
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
            self.live.cancel(request, "the client has gone")

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
        found = self.live.of_attempt(message.request)
        if found is None:
            return
        request, attempt = found
        try:
            self._heard(request, attempt, peer, message)
        except Exception as error:  # else it would cost the connection, and so everybody's requests
            log.exception("%s of %s about request %s failed", type(message).__name__, peer, message.request)
            self.live.fail(request, RequestFailed("internal_error", f"the gateway: {type(error).__name__}: {error}"))

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
            self._recovery.lose(request, attempt, peer, RequestFailed(message.error, message.message))
        elif isinstance(message, Undelivered):
            self.peers.post_if_up(message.peer, Cancel(request=attempt.spec.id, reason=message.message))
            self._recovery.lose(request, attempt, message.peer, RequestFailed(message.error, message.message))
        else:
            self._recovery.take_over(request, attempt, message)

    def on_lost(self, peer: str, reason: str) -> None:
        self.router.lost(peer)
        failure = RequestFailed("worker_lost", f"{peer} was lost: {reason}")
        for request in self.live:
            for attempt in list(request.attempts):
                if peer in attempt.unsettled:
                    self._recovery.lose(request, attempt, peer, failure)
                    self._done(request, attempt, peer)

    def on_change(self) -> None:
        self._recovery.reconnected()

    def status_for(self, peer: str) -> None:
        return None

    # -- the answer --------------------------------------------------------------------------------------------

    def _take(self, request: LiveRequest, attempt: Attempt, peer: str, message: Tokens) -> None:
        if request.over or attempt is not request.attempt:
            return
        try:
            ready = request.merge.offer(message.position, message.ids, message.finish_reason, peer, message.logprobs)
        except MergeConflict as conflict:
            self._recovery.diverged(request, attempt, peer, RequestFailed(conflict.name, str(conflict)))
            return
        if not ready:
            return
        try:
            finish_reason = request.note(ready)
        except Exception as error:  # a fault in making text of it is this request's alone
            log.exception("request %s: no text can be made of its tokens", request.spec.id)
            self.live.fail(request, RequestFailed("internal_error", f"{type(error).__name__}: {error}"))
            return
        relay = attempt.spec.relay
        if attempt.unheard and peer == attempt.spec.main and relay is not None and attempt.works(relay):
            # both decode, and main decode is ahead now
            self.peers.post_if_up(relay, Cancel(request=attempt.spec.id, reason=f"{peer} has taken over"))
        elif attempt.overtaken_by(peer, self._handoff) and relay is not None:
            self.peers.post_if_up(relay, StopRelay(request=attempt.spec.id))
        if finish_reason is not None:
            self.live.finish(request, finish_reason)
            if not request.merge.finished:  # only the gateway sees a stop string
                for worker in sorted(attempt.unsettled):
                    self.peers.post_if_up(worker, Finish(request=attempt.spec.id))

    def _done(self, request: LiveRequest, attempt: Attempt, worker: str) -> None:
        self.live.let_go(request, attempt, worker)
        if not request.over:
            self._recovery.check_hope(request, attempt)
