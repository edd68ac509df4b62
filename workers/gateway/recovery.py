"""Recovery of requests whose workers are lost: who goes on, who is told, and when an attempt is replayed.

The rules are the attempts' (`attempts.py`) and the routes' (`policy.py`); here they meet connections and timers.
"""

import time
from functools import partial

from workers.gateway.attempts import ANSWERLESS, HOPELESS, NOT_REPLAYED, Attempt, LiveRequest
from workers.gateway.live_requests import REQUEST_DEADLINE_S, LiveRequests
from workers.gateway.routing import Router
from workers.policy import NoRoute, Route
from workers.roles.request import RequestFailed
from workers.wire.deadlines import Timer
from workers.wire.messages import Cancel, Unheard, Without
from workers.wire.peers import Peers

MAX_ATTEMPTS = 8


class Recovery:
    """Recovers the live requests of one gateway, whose routes are chosen by `router`."""

    def __init__(self, peers: Peers, router: Router, live: LiveRequests, handoff: str) -> None:
        self._peers = peers
        self._router = router
        self._live = live
        self._handoff = handoff

    def lose(self, request: LiveRequest, attempt: Attempt, worker: str, failure: RequestFailed) -> None:
        """A worker does nothing more for an attempt. The others are told; if none of them can go on, it is replayed."""
        if worker in attempt.gone:
            return
        attempt.gone[worker] = failure
        if attempt is not request.attempt or (request.merge.finished and not request.over):
            return
        if not request.over or request.log.finish_reason is not None:
            known = request.answered_in(attempt)
            for target, message in attempt.without(worker, known, request.log.finish_reason):
                self._peers.post_if_up(target, message)
        if request.over:
            return
        if failure.name in HOPELESS:
            self._live.fail(request, failure)
            return
        if failure.name not in ANSWERLESS:
            request.losses.setdefault(worker, failure)
            request.note_loss(worker, failure)
        request.note_recovery("goes-on", attempt.decoders[:1])
        self.check_hope(request, attempt)

    def diverged(self, request: LiveRequest, attempt: Attempt, peer: str, failure: RequestFailed) -> None:
        """A token is not the one that stands. Of two that decode side by side, the one that is behind goes.

        Two machines, or two batches, may round a tie between two candidates another way; either answer is right.
        """
        beside = attempt.unheard or self._handoff == "overlap"
        if not beside or attempt.decoders in ([], [peer]) or peer not in (attempt.spec.relay, attempt.spec.main):
            self._live.fail(request, failure)
            return
        self._peers.post_if_up(peer, Cancel(request=attempt.spec.id, reason=str(failure)[:4000]))
        self.lose(request, attempt, peer, failure)

    def take_over(self, request: LiveRequest, attempt: Attempt, message: Unheard) -> None:
        """Main decode does not hear its relay: it gets the ids from here."""
        main, finish_reason = attempt.spec.main, request.log.finish_reason
        if main is None or (request.over and finish_reason is None):
            return
        known = request.answered_in(attempt)
        take_over = Without(request=attempt.spec.id, lost=message.peer, ids=known, finish_reason=finish_reason)
        self._peers.post_if_up(main, take_over)
        if not request.over and not attempt.unheard and message.peer not in attempt.gone:
            attempt.unheard = True
            request.note_loss(message.peer, RequestFailed("unheard", message.reason))
            request.note_recovery("take-over", [main])

    def check_hope(self, request: LiveRequest, attempt: Attempt) -> None:
        """Begin a replay when nobody of the latest attempt can make the rest of the answer."""
        if attempt is not request.attempt or attempt.decoders or request.over or request.merge.finished:
            return
        if request.stranded is None:
            self._recover(request)

    def reconnected(self) -> None:
        """Connections have changed: requests that wait for anybody may go on."""
        for request in self._live:
            if request.stranded is not None:
                self._recover(request)

    def _recover(self, request: LiveRequest) -> None:
        """Replay the prompt and what was answered on workers that are there; wait a while for one, or fail."""
        by_itself = next((failure for failure in request.losses.values() if failure.name in NOT_REPLAYED), None)
        if by_itself is not None:
            self._live.fail(request, by_itself)
            return
        self._live.cancel_workers(request, "replayed elsewhere")
        avoid: set[str] = set()
        while len(request.attempts) < MAX_ATTEMPTS:
            try:
                route = self._route_again(request, avoid)
            except NoRoute:
                self._strand(request)
                return
            left_s = REQUEST_DEADLINE_S - (time.monotonic_ns() - request.log.start_ns) / 1e9
            attempt = request.replay(route, max(1.0, left_s))
            self._live.add_attempt(request, attempt)
            if self._live.ask(attempt.spec):
                request.rescued()
                request.note_recovery("replay", list(route.workers))
                return
            avoid.add(route.prefill)
            attempt.unsettled.clear()  # nobody has heard of it
        self._give_up(request)

    def _route_again(self, request: LiveRequest, avoid: set[str]) -> Route:
        """Raises NoRoute. Rather than nobody, one that was lost and is back."""
        prompt = [*request.spec.prompt, *request.merge.delivered]
        others = [other for other in self._live if other is not request]
        try:
            return self._router.route(prompt, others, avoid | request.losses.keys())
        except NoRoute:
            failed = {name for name, failure in request.losses.items() if failure.name != "worker_lost"}
            return self._router.route(prompt, others, avoid | failed)

    def _strand(self, request: LiveRequest) -> None:
        """Nobody is there. Those that are not connected have the time of a connection's making to come back."""
        if request.stranded is not None:
            return
        absent = [peer for peer in self._peers.known.values() if self._peers.link(peer.name) is None]
        if not absent:
            self._give_up(request)
            return
        request.note_recovery("nobody", [])
        request.stranded = Timer(lambda: max(peer.path.connect_s for peer in absent), partial(self._give_up, request))

    def _give_up(self, request: LiveRequest) -> None:
        first = next(iter(request.losses.values()), RequestFailed("worker_lost", "the answer ended before its end"))
        told = "; ".join(str(failure) for failure in request.losses.values())
        attempts = f"{len(request.attempts)} attempt" + ("s" if len(request.attempts) > 1 else "")
        self._live.fail(request, RequestFailed(first.name, f"{told or first}; after {attempts} no worker can go on"))
