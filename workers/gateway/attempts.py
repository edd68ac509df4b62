"""A request's attempts: who still works on each, whether its answer can still come, and what a loss means. No I/O.

An attempt is one request to the workers, with an id of its own. The first one has the client's prompt; a replay has the
prompt and all that was answered so far, and goes on from there. A worker's tokens depend on what stands before them and
on nothing else, so whoever makes them, they are the same, and merging by position makes one answer of all attempts.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from workers.gateway.merge import MergedToken, PositionMerge
from workers.policy import Route
from workers.records import RequestLog
from workers.roles.request import RequestFailed
from workers.wire.deadlines import Timer
from workers.wire.messages import Message, RequestSpec, Without

ANSWERLESS = frozenset({"prefill_lost", "relay_lost", "transfer_aborted", "handover_deadline"})
"""Errors of workers that gave up because another one was lost: no reason to avoid them."""
HOPELESS = frozenset({"bad_request", "request_deadline", "computation_failed"})
"""Errors that another worker would make as well."""
NOT_REPLAYED = frozenset({"internal_error"})
"""Errors that another worker may well make as well: who holds the request goes on, and nobody else is asked."""


class Attempt:
    """One request to workers, from its start until all have let go of it."""

    def __init__(self, spec: RequestSpec, route: Route) -> None:
        self.spec = spec
        self.route = route
        self.unsettled = set(route.workers)
        """Workers that may still hold something of it."""
        self.gone: dict[str, RequestFailed] = {}
        """Workers that will do nothing more for it, and why."""
        self.unheard = False
        """Main decode took over from the gateway's ids while the relay may go on."""
        self.overtaken = False
        """Main decode's tokens come before the relay's."""

    def works(self, worker: str | None) -> bool:
        return worker in self.unsettled and worker not in self.gone

    def overtaken_by(self, worker: str, handoff: str) -> bool:
        """Whether a token of `worker` is the first that shows it ahead of the relay, both decoding. Once."""
        if handoff != "overlap" or self.overtaken or worker != self.spec.main or not self.works(self.spec.relay):
            return False
        self.overtaken = True
        return True

    @property
    def decoders(self) -> list[str]:
        """Workers that may still make tokens, in the order in which they would."""
        spec = self.spec
        chosen = [spec.prefill] if spec.alone else [spec.relay, spec.main]
        return [name for name in chosen if name is not None and self.works(name)]

    def without(self, lost: str, ids: list[int], finish_reason: str | None) -> list[tuple[str, Message]]:
        """Messages to the others when `lost` is gone; `ids`: this attempt's part of the answer, so far as known."""
        messages: list[tuple[str, Message]] = []
        for worker in sorted(self.unsettled - self.gone.keys() - {lost}):
            if worker == self.spec.main and lost == self.spec.relay:
                message = Without(request=self.spec.id, lost=lost, ids=ids, finish_reason=finish_reason)
            else:
                message = Without(request=self.spec.id, lost=lost)
            messages.append((worker, message))
        return messages


class Taken(NamedTuple):
    """Tokens that came together, those of the answer, with their text, and why the answer ends with them."""

    text: str
    tokens: list[MergedToken]
    finish_reason: str | None


Read = Callable[[list[MergedToken]], Taken]
"""Makes text of the next tokens, cut where a stop string ends the answer."""


class LiveRequest:
    """One client's request, from submission until every worker has let go of it."""

    def __init__(self, attempt: Attempt, log_: RequestLog, read: Read) -> None:
        self.spec = attempt.spec
        """The first attempt's: as the client asked."""
        self.log = log_
        self.attempts = [attempt]
        self.merge = PositionMerge(len(self.spec.prompt))
        self._read = read
        self.queue: asyncio.Queue[Taken | RequestFailed] = asyncio.Queue()
        self.over = False  # the answer or its error is here, or the client has gone
        self.deadline: asyncio.TimerHandle | Timer | None = None
        self.stranded: Timer | None = None
        """Timer that gives it up, while nobody is there to go on."""
        self.losses: dict[str, RequestFailed] = {}
        """Workers that failed this request themselves, first ones first."""

    @property
    def attempt(self) -> Attempt:
        """The latest attempt: the only one whose tokens count."""
        return self.attempts[-1]

    @property
    def unsettled(self) -> set[str]:
        """Workers that may still hold something of any attempt."""
        return set().union(*(attempt.unsettled for attempt in self.attempts))

    @property
    def ended_on_relay(self) -> bool:
        """The last token so far is a relay's."""
        return bool(self.log.instances) and self.log.roles.get(self.log.instances[-1]) == "relay-decode"

    def answered_in(self, attempt: Attempt) -> list[int]:
        """The part of the answer behind an attempt's own prompt."""
        return self.merge.delivered[len(attempt.spec.prompt) - len(self.spec.prompt) :]

    def note(self, tokens: list[MergedToken]) -> str | None:
        """Take the next tokens of the answer; returns why it ends with them, if it does.

        What is cut off here counts nowhere: neither in the record nor in what the client is told.
        """
        taken = self._read(tokens)
        now_ns = time.monotonic_ns()
        for token in taken.tokens:
            self.log.token_ns.append(now_ns)
            self.log.instances.append(token.instance)
        self.queue.put_nowait(taken)
        return taken.finish_reason

    def note_loss(self, lost: str, failure: RequestFailed) -> None:
        """Record what was lost, why, and after how many tokens of the answer."""
        entry: dict[str, Any] = {
            "at_ms": (time.monotonic_ns() - self.log.start_ns) / 1e6,
            "position": len(self.merge.delivered),
            "lost": lost,
            "error": failure.name,
            "reason": str(failure),
        }
        self.log.recovery.append(entry)

    def note_recovery(self, how: str, by: list[str]) -> None:
        """Record who goes on after the latest loss; again, when that comes to nothing either."""
        if self.log.recovery:
            self.log.recovery[-1].update(how=how, by=by)

    def rescued(self) -> None:
        """Somebody goes on with it, or nobody has to: it is not given up."""
        if self.stranded is not None:
            self.stranded.cancel()
            self.stranded = None

    def replay(self, route: Route, deadline_s: float) -> Attempt:
        """A new attempt that goes on where the answer is now; what earlier ones made behind a gap is forgotten."""
        self.merge.restart()
        done = self.merge.delivered
        spec = msgspec.structs.replace(
            self.spec,
            id=f"{self.spec.id}.{len(self.attempts)}",
            prefill=route.prefill,
            relay=route.relay,
            main=route.main,
            prompt=[*self.spec.prompt, *done],
            sampling=msgspec.structs.replace(self.spec.sampling, max_tokens=self.spec.sampling.max_tokens - len(done)),
            deadline_s=deadline_s,
        )
        attempt = Attempt(spec, route)
        self.attempts.append(attempt)
        self.log.replays += 1
        return attempt
