"""Requests on their way: chosen a route, started at prefill, merged, cancelled, recorded. Knows no HTTP."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable

from workers.cache import CacheMirror, chain_root, extend_chain
from workers.environment import WorkerEnvironment
from workers.gateway.merge import MergeConflict, MergedToken, PositionMerge
from workers.models import LoadedModel
from workers.policy import Route, WorkerView, route_for
from workers.records import RecordWriter, RequestLog
from workers.roles.worker import RequestFailed, local_facts
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
    Tokens,
)
from workers.wire.peers import Peers

log = logging.getLogger(__name__)

REQUEST_DEADLINE_S = 900.0
SETTLE_S = 30.0  # after that: for the workers to say that they hold nothing more


class LiveRequest:
    """One request, from submission until every worker has let go of it."""

    def __init__(self, spec: RequestSpec, log_: RequestLog) -> None:
        self.spec = spec
        self.log = log_
        self.merge = PositionMerge(len(spec.prompt))
        self.queue: asyncio.Queue[list[MergedToken] | RequestFailed] = asyncio.Queue()
        self.unsettled = set(log_.route.workers)
        self.over = False  # the client has its answer, its error, or has gone
        self.deadline: asyncio.TimerHandle | None = None

    def note(self, tokens: list[MergedToken]) -> None:
        now_ns = time.monotonic_ns()
        for token in tokens:
            self.log.token_ns.append(now_ns)
            self.log.instances.append(token.instance)
        self.queue.put_nowait(tokens)


class Dispatcher:
    """The gateway's side of the wire. `Handler` of its connections."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        self.environment = environment
        self.loaded = loaded
        self.peers = Peers(local_facts(environment, loaded), environment.peers, self, None, 0)
        self.live: dict[str, LiveRequest] = {}
        self._chain_root = chain_root(loaded.fingerprint, environment.serving.block_size)
        self.mirrors = {name: CacheMirror() for name in self.peers.known}
        self._records = RecordWriter(environment.records)
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

    def submit(self, prompt: list[int], sampling: SamplingSpec, prefix: str) -> LiveRequest:
        """Choose a route and start. Raises NoRoute, or WireError when prefill has just gone."""
        serving = self.environment.serving
        route = route_for(serving.pipeline, serving.relay_threshold, len(prompt), self._views(prompt))
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
        handoff = "one-shot" if serving.handoff == "auto" else serving.handoff
        entry = RequestLog(
            spec.id, self.loaded.config.name, route, len(prompt), handoff, time.time(), time.monotonic_ns()
        )
        request = LiveRequest(spec, entry)
        self.peers.post(route.prefill, Prefill(spec=spec))
        self.live[spec.id] = request
        request.deadline = asyncio.get_running_loop().call_later(REQUEST_DEADLINE_S, self._expire, request)
        return request

    async def tokens(self, request: LiveRequest) -> AsyncGenerator[list[MergedToken], None]:
        """The answer in order, exactly once. Raises RequestFailed. Leaving early cancels the request everywhere."""
        try:
            while True:
                item = await request.queue.get()
                if isinstance(item, RequestFailed):
                    raise item
                finish_reason = item[-1].finish_reason
                if finish_reason is not None:
                    self._end(request, finish_reason, None)
                yield item
                if finish_reason is not None:
                    return
        finally:
            self.cancel(request, "the client has gone")

    def cancel(self, request: LiveRequest, reason: str, *, finish_reason: str | None = None) -> None:
        """End a request here, and what it does on every worker. Nothing happens when it is over already.

        `finish_reason`: the answer is complete for a reason that only the gateway sees (a stop string).
        """
        if request.over:
            return
        self._end(request, finish_reason, None if finish_reason else f"cancelled: {reason}")
        if finish_reason is None:
            self._cancel_workers(request, reason)
        else:
            for worker in sorted(request.unsettled):
                self.peers.post_if_up(worker, Finish(request=request.spec.id))

    # -- Handler -----------------------------------------------------------------------------------------------

    def on_message(self, peer: str, message: Message) -> None:
        if isinstance(message, Status):
            return
        if isinstance(message, CacheNotice):
            if peer in self.mirrors:
                self.mirrors[peer].apply(message.inserted, message.evicted, reset=message.reset)
            return
        if not isinstance(message, Tokens | Report | Failed):
            log.warning("%s sent %s, which a gateway does not expect", peer, type(message).__name__)
            return
        request = self.live.get(message.request)
        if request is None:
            return
        if isinstance(message, Tokens):
            self._take(request, peer, message)
        elif isinstance(message, Report):
            request.log.spans += [(peer, span) for span in message.spans]
            if message.done:
                self._done(request, peer)
        else:
            self._fail(request, RequestFailed(message.error, message.message))

    def on_lost(self, peer: str, reason: str) -> None:
        self.mirrors[peer].apply([], [], reset=True)
        for request in list(self.live.values()):
            if peer in request.unsettled:
                self._fail(request, RequestFailed("worker_lost", f"{peer} was lost: {reason}"))
                self._done(request, peer)

    def on_change(self) -> None:
        pass

    def status_for(self, peer: str) -> None:
        return None

    # -- inside ------------------------------------------------------------------------------------------------

    def _views(self, prompt: list[int]) -> list[WorkerView]:
        """The connected workers, and what their caches hold of a prompt by their own notices: no question, no wait."""
        views = []
        block_size = self.environment.serving.block_size
        hashes = extend_chain(self._chain_root, [], prompt, block_size)
        for peer in self.peers.known.values():
            link = self.peers.link(peer.name)
            if link is not None:
                connected = frozenset(link.peer_status.connected) if link.peer_status else frozenset()
                active = sum(peer.name in request.unsettled for request in self.live.values())
                matched = self.mirrors[peer.name].held(hashes) * block_size
                views.append(WorkerView(peer.name, peer.role, active, connected, matched))
        return views

    def route_now(self) -> Route:
        """The route a request that no cache knows would take now. Raises NoRoute: the lab cannot serve."""
        serving = self.environment.serving
        return route_for(serving.pipeline, serving.relay_threshold, 0, self._views([]))

    def _take(self, request: LiveRequest, peer: str, message: Tokens) -> None:
        if request.over:
            return
        try:
            ready = request.merge.offer(message.position, message.ids, message.finish_reason, peer, message.logprobs)
        except MergeConflict as conflict:
            self._fail(request, RequestFailed(conflict.name, str(conflict)))
            return
        if ready:
            request.note(ready)

    def _fail(self, request: LiveRequest, failure: RequestFailed) -> None:
        if request.over or request.merge.finished:
            return
        self._end(request, None, f"{failure.name}: {failure}")
        request.queue.put_nowait(failure)
        self._cancel_workers(request, failure.name)

    def _end(self, request: LiveRequest, finish_reason: str | None, error: str | None) -> None:
        request.over = True
        request.log.end_ns = time.monotonic_ns()
        request.log.finish_reason = finish_reason
        request.log.error = error
        # Workers may still be busy with it (KV on its way to main decode): their reports complete the record.
        if not request.unsettled:
            self._settle(request)

    def _cancel_workers(self, request: LiveRequest, reason: str) -> None:
        for worker in sorted(request.unsettled):
            self.peers.post_if_up(worker, Cancel(request=request.spec.id, reason=reason[:4000]))

    def _done(self, request: LiveRequest, worker: str) -> None:
        request.unsettled.discard(worker)
        if request.over and not request.unsettled:
            self._settle(request)

    def _expire(self, request: LiveRequest) -> None:
        self._fail(request, RequestFailed("request_deadline", f"no answer within {REQUEST_DEADLINE_S:.0f} s"))
        if request.spec.id in self.live:  # a worker that never reports must not keep the request for ever
            request.deadline = asyncio.get_running_loop().call_later(SETTLE_S, self._settle, request)

    def _settle(self, request: LiveRequest) -> None:
        if self.live.pop(request.spec.id, None) is None:
            return
        if request.deadline is not None:
            request.deadline.cancel()
        request.log.unsettled = tuple(sorted(request.unsettled))
        if request.unsettled:
            self._cancel_workers(request, "the request is over")
        self._records.write(request.log.record())
        self.on_settled(request.log)
