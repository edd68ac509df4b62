"""The gateway's live requests: from submission until every worker has let go, however they end. Knows no HTTP.

A request is over when its answer or its error is there, or when its client has gone; it is settled, and recorded, when
no worker holds anything of it any more.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from workers.gateway.attempts import Attempt, LiveRequest
from workers.records import RecordWriter, RequestLog
from workers.roles.request import RequestFailed
from workers.wire.deadlines import Timer
from workers.wire.frames import WireError
from workers.wire.messages import Cancel, Prefill, RequestSpec
from workers.wire.peers import Peers

log = logging.getLogger(__name__)

REQUEST_DEADLINE_S = 900.0
SETTLE_S = 30.0  # after that, and a round trip: for the workers to say that they hold nothing more


class LiveRequests:
    """The requests of one gateway, by id. `end_on_rld`: an answer that ends on the relay is not kept by main decode."""

    def __init__(self, peers: Peers, records: RecordWriter, end_on_rld: bool) -> None:
        self._peers = peers
        self._records = records
        self._end_on_rld = end_on_rld
        self._requests: dict[str, LiveRequest] = {}
        self._attempts: dict[str, tuple[LiveRequest, Attempt]] = {}
        self.on_settled: Callable[[RequestLog], None] = lambda _: None
        """Told of every request when its log is complete."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._requests.values()))

    def __getitem__(self, request: str) -> LiveRequest:
        return self._requests[request]

    def of_attempt(self, attempt: str) -> tuple[LiveRequest, Attempt] | None:
        """The request and the attempt that a worker's message is about, if it is live."""
        return self._attempts.get(attempt)

    def add(self, request: LiveRequest) -> None:
        """A request has been submitted; it has REQUEST_DEADLINE_S from now on."""
        self._requests[request.spec.id] = request
        self.add_attempt(request, request.attempt)
        request.deadline = asyncio.get_running_loop().call_later(REQUEST_DEADLINE_S, self._expire, request)

    def add_attempt(self, request: LiveRequest, attempt: Attempt) -> None:
        """A request is tried anew: messages about the attempt are about it."""
        self._attempts[attempt.spec.id] = request, attempt

    def settle_all(self) -> None:
        """Wait for no worker any more."""
        for request in self:
            self._settle(request)

    # -- workers -----------------------------------------------------------------------------------------------

    def ask(self, spec: RequestSpec) -> bool:
        """Start an attempt; whether the worker that prefills is there to hear of it."""
        try:
            self._peers.post(spec.prefill, Prefill(spec=spec))
        except WireError as error:
            log.info("request %s: %s", spec.id, error)
            return False
        return True

    def cancel_workers(self, request: LiveRequest, reason: str) -> None:
        """Tell all workers of all attempts to let go."""
        for attempt in request.attempts:
            for worker in sorted(attempt.unsettled):
                self._peers.post_if_up(worker, Cancel(request=attempt.spec.id, reason=reason[:4000]))

    def let_go(self, request: LiveRequest, attempt: Attempt, worker: str) -> None:
        """A worker holds nothing of an attempt any more."""
        attempt.unsettled.discard(worker)
        if request.over and not request.unsettled:
            self._settle(request)

    # -- ends --------------------------------------------------------------------------------------------------

    def finish(self, request: LiveRequest, finish_reason: str) -> None:
        """The answer is there. Workers may still be busy with it (KV on its way to main decode)."""
        self._end(request, finish_reason, None)

    def fail(self, request: LiveRequest, failure: RequestFailed) -> None:
        """End a request with an error, unless it is over."""
        if request.over:
            return
        self._end(request, None, f"{failure.name}: {failure}")
        request.queue.put_nowait(failure)
        self.cancel_workers(request, failure.name)

    def cancel(self, request: LiveRequest, reason: str) -> None:
        """End a request here, and what it does on every worker, unless it is over."""
        if request.over:
            return
        self._end(request, None, f"cancelled: {reason}")
        self.cancel_workers(request, reason)

    def _end(self, request: LiveRequest, finish_reason: str | None, error: str | None) -> None:
        request.over = True
        request.log.end_ns = time.monotonic_ns()
        request.log.finish_reason = finish_reason
        request.log.error = error
        request.rescued()
        if finish_reason is not None and self._end_on_rld and request.ended_on_relay:
            self.cancel_workers(request, "the answer ended on the relay")
        # reports of workers that are still busy with it complete the record
        if not request.unsettled:
            self._settle(request)

    def _expire(self, request: LiveRequest) -> None:
        self.fail(request, RequestFailed("request_deadline", f"no answer within {REQUEST_DEADLINE_S:.0f} s"))
        if request.spec.id in self._requests:  # a worker that never reports must not keep the request for ever
            request.deadline = Timer(self._settle_s, partial(self._settle, request))

    def _settle_s(self) -> float:
        """Time that a worker's report may take, over the longest link that is."""
        paths = [peer.path for peer in self._peers.known.values()]
        return SETTLE_S + max((path.rtt_s + path.queue_s for path in paths), default=0.0)

    def _settle(self, request: LiveRequest) -> None:
        if self._requests.pop(request.spec.id, None) is None:
            return
        for attempt in request.attempts:
            self._attempts.pop(attempt.spec.id, None)
        if request.deadline is not None:
            request.deadline.cancel()
        request.log.unsettled = tuple(sorted(request.unsettled))
        if request.unsettled:
            self.cancel_workers(request, "the request is over")
        self._records.write(request.log.record())
        self.on_settled(request.log)
