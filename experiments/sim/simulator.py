"""The event loop: a trace's requests through prefill, pool, relay and main decode. Deterministic, a heap of times.

A request's way: `_arrive` (route, prefill queue), `_prefilled`, `_main_ready`, `_asked` (relay hears), `_settle`.
Prefill is first come first served on each node; what a worker's cache holds is seen everywhere at once.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from experiments.sim.deployment import Deployment, Variant
from experiments.sim.handover import Relay, hand_over
from experiments.sim.outcome import Outcome, Run
from experiments.sim.state import Live, Node, Pool, SimCache
from experiments.traces.trace import Request, Trace, blocks_of
from workers.cache import common_blocks
from workers.handover import RelayLoad, choose_mode
from workers.policy import Route, WorkerView, route_for


def simulate(trace: Trace, variant: Variant, deployment: Deployment, warm_up: int = 0) -> Run:
    """Every request of the trace. The first `warm_up` only fill the caches, before time begins."""
    return _Simulator(trace, variant, deployment).run(warm_up)


class _Simulator:
    def __init__(self, trace: Trace, variant: Variant, deployment: Deployment) -> None:
        self._trace, self._variant, self._is = trace, variant, deployment
        counts = (
            ("p", "prefill", deployment.prefill_nodes),
            ("rld", "relay-decode", deployment.relay_nodes),
            ("md", "main-decode", deployment.main_nodes),
        )
        self._nodes = {
            f"{prefix}{index}": Node(f"{prefix}{index}", role, SimCache(trace.block_tokens, deployment.cache_tokens))
            for prefix, role, count in counts
            for index in range(count)
        }
        self._all = frozenset(self._nodes)
        self._pools: dict[tuple[str, str], Pool[Live]] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._now_s = 0.0

    def run(self, warm_up: int) -> Run:
        requests = self._trace.requests
        self._warm(requests[:warm_up])
        outcomes = []
        for index, request in enumerate(requests[warm_up:]):
            tokens = min(request.input_tokens, self._is.context_tokens)
            outcome = Outcome(index, request.time_ns / 1e9, tokens, max(1, request.output_tokens))
            outcomes.append(outcome)
            path = request.blocks[: blocks_of(tokens, self._trace.block_tokens)]
            self._at(outcome.arrival_s, self._arrive, outcome, path)
        while self._events:
            self._now_s, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
        return Run(self._variant.name, outcomes)

    def _warm(self, requests: Sequence[Request]) -> None:
        """Prompts go round the nodes of each role, as they would one after the other."""
        by_role: dict[str, list[Node]] = {}
        for node in self._nodes.values():
            by_role.setdefault(node.role, []).append(node)
        for index, request in enumerate(requests):
            tokens = min(request.input_tokens, self._is.context_tokens)
            path = request.blocks[: blocks_of(tokens, self._trace.block_tokens)]
            for nodes in by_role.values():
                nodes[index % len(nodes)].cache.keep(path)

    def _at(self, time_s: float, act: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1  # equal times keep the order in which they were scheduled
        heapq.heappush(self._events, (time_s, self._scheduled, act, arguments))

    # -- prefill -----------------------------------------------------------------------------------------------

    def _arrive(self, outcome: Outcome, path: Sequence[int]) -> None:
        route = self._route(outcome, path)
        live = Live(outcome, path, route)
        outcome.pipeline, outcome.prefill = route.pipeline, route.prefill
        if route.main is not None:
            outcome.md_hit = route.hit_rate
        for name in route.workers:
            self._nodes[name].active += 1
            live.unsettled.add(name)
        if route.pipeline == "md":  # prfaas: the request itself crosses, then main decode does it all
            self._at(self._now_s + self._is.rtt_s / 2, self._queue_prefill, live)
        else:
            self._queue_prefill(live)

    def _route(self, outcome: Outcome, path: Sequence[int]) -> Route:
        is_, policy = self._is, self._variant.policy
        views = [
            WorkerView(
                node.name,
                node.role,
                node.active,
                self._all,
                min(max(node.cache.matched(path), self._coming(node, path)), outcome.prompt_tokens),
                is_.busy_tokens,
                node.cache.tokens,
            )
            for node in self._nodes.values()
        ]
        return route_for(policy, is_.relay_threshold, outcome.prompt_tokens, views, is_.offload_tokens)

    def _coming(self, node: Node, path: Sequence[int]) -> int:
        """Tokens of the prompt that a prefill node computes or will have by its turn. The gateway counts them, too."""
        if node.role != "prefill":
            return 0
        return max((common_blocks(live.path, path) for live in node.queue), default=0) * self._trace.block_tokens

    def _queue_prefill(self, live: Live) -> None:
        """Joins the node's queue."""
        node = self._nodes[live.route.prefill]
        live.queued_s = self._now_s
        node.queue.append(live)
        if len(node.queue) == 1:
            self._begin_prefill(node)

    def _begin_prefill(self, node: Node) -> None:
        """The first in the queue has its turn. What the cache holds is looked up now, as the live worker does: what was
        computed while it waited is there.
        """
        live = node.queue[0]
        outcome = live.outcome
        cached = min(node.cache.matched(live.path), outcome.prompt_tokens - 1)
        outcome.p_hit = cached / outcome.prompt_tokens
        alone = live.route.pipeline == "md"
        if alone:
            outcome.md_hit = outcome.p_hit
        speed = self._is.main_prefill_tokens_per_s if alone else self._is.prefill_tokens_per_s
        outcome.prefill_queue_s = self._now_s - live.queued_s
        outcome.prefill_s = (outcome.prompt_tokens - cached) / speed
        live.prefill_end_s = self._now_s + outcome.prefill_s
        if self._variant.chunked and live.route.main is not None and not alone:
            ready_s = min(outcome.prefill_s, self._is.chunk_tokens / speed)  # the first chunk is there
            self._at(self._now_s + ready_s, self._ask_connection, live)
        self._at(live.prefill_end_s, self._prefilled, live)

    def _prefilled(self, live: Live) -> None:
        node, route = self._nodes[live.route.prefill], live.route
        node.cache.keep(live.path)
        node.queue.popleft()
        if node.queue:
            self._begin_prefill(node)
        if route.pipeline == "md":
            self._decode_on_main(live, self._now_s, 0)
            return
        if route.relay is not None:
            lacking = max(0, live.outcome.prompt_tokens - self._nodes[route.relay].cache.matched(live.path))
            fabric_s = lacking * self._is.kv_bytes_per_token / self._is.fabric_bytes_per_s
            self._at(self._now_s + fabric_s, self._relay_begins, live)
        if route.main is None:
            self._settle(live, route.prefill)
        elif not self._variant.chunked:
            self._ask_connection(live)

    # -- the WAN -----------------------------------------------------------------------------------------------

    def _pool(self, live: Live) -> Pool[Live]:
        assert live.route.main is not None
        return self._pools.setdefault((live.route.prefill, live.route.main), Pool(self._is.connections))

    def _ask_connection(self, live: Live) -> None:
        if live.dropped:
            return
        assert live.route.main is not None
        held = min(self._nodes[live.route.main].cache.matched(live.path), live.outcome.prompt_tokens - 1)
        live.outcome.md_hit = held / live.outcome.prompt_tokens  # by now; the route was chosen by what it was then
        live.outcome.kv_bytes = (live.outcome.prompt_tokens - held) * self._is.kv_bytes_per_token
        live.asked_s = self._now_s
        if self._pool(live).ask(live):
            self._lent(live)

    def _lent(self, live: Live) -> None:
        """A connection is this request's until the receiver's confirmation is back."""
        outcome, rate, half_s = live.outcome, self._is.connection_bytes_per_s, self._is.rtt_s / 2
        live.holds_connection = True
        assert live.asked_s is not None
        outcome.kv_queue_s = self._now_s - live.asked_s
        sent_s = self._now_s + outcome.kv_bytes / rate
        if self._variant.chunked:  # it cannot end before prefill has, and then the last chunk is still to come
            last = min(outcome.kv_bytes, self._is.chunk_tokens * self._is.kv_bytes_per_token)
            sent_s = max(sent_s, live.prefill_end_s + last / rate)
        outcome.kv_xfer_s = sent_s + half_s - self._now_s
        self._at(sent_s + half_s, self._main_ready, live)
        self._at(sent_s + 2 * half_s, self._give_back, live)

    def _give_back(self, live: Live) -> None:
        if not live.holds_connection:
            return  # given up before
        live.holds_connection = False
        following = self._pool(live).release()
        if following is not None:
            self._lent(following)
        self._settle(live, live.route.prefill)

    # -- decode ------------------------------------------------------------------------------------------------

    def _relay_begins(self, live: Live) -> None:
        outcome, relay = live.outcome, self._nodes[live.route.relay or ""]
        relay.cache.keep(live.path)
        relay.relaying += 1
        live.relay = Relay(self._now_s, outcome.answer_tokens, self._is.relay_itl_s)
        outcome.first_token_s = self._now_s
        self._at(live.relay.emitted_at(outcome.answer_tokens), self._relay_ends, live)

    def _relay_ends(self, live: Live) -> None:
        """The relay has made the whole answer, unless main decode has taken over."""
        if live.relay_free:
            return
        outcome = live.outcome
        outcome.relayed, outcome.last_token_s = outcome.answer_tokens, self._now_s
        self._free_relay(live)
        if live.route.main is not None and self._variant.end_on_rld and not live.main_has_kv:
            self._drop(live)
        elif live.route.main is None or live.main_has_kv:
            self._settle(live, live.route.main)

    def _drop(self, live: Live) -> None:
        """Its KV does not go on to main decode."""
        live.dropped = True
        if live.holds_connection:
            self._give_back(live)
        elif live.asked_s is not None and self._pool(live).leave(live):
            self._settle(live, live.route.prefill)
        self._settle(live, live.route.main)

    def _free_relay(self, live: Live) -> None:
        live.relay_free = True
        self._nodes[live.route.relay or ""].relaying -= 1
        self._settle(live, live.route.relay)

    def _main_ready(self, live: Live) -> None:
        """Main decode holds the whole prompt's KV."""
        if live.dropped:
            return
        live.main_has_kv = True
        self._nodes[live.route.main or ""].cache.keep(live.path)
        if live.route.relay is None:
            self._decode_on_main(live, self._now_s, 0)
        elif live.relay_free:  # the answer ended on the relay
            self._settle(live, live.route.main)
        else:
            self._at(self._now_s + self._is.rtt_s / 2, self._asked, live)

    def _asked(self, live: Live) -> None:
        """The relay hears that main decode is ready."""
        if live.relay_free:
            self._settle(live, live.route.main)
            return
        outcome, node, relay = live.outcome, self._nodes[live.route.relay or ""], live.relay
        if relay is None:  # chunked sending across the WAN was faster than the fabric: a token, and over
            relay = live.relay = Relay(self._now_s, outcome.answer_tokens, self._is.relay_itl_s)
        others = node.relaying - 1
        waiting = node.active - node.relaying
        outcome.handoff_mode, _ = choose_mode(self._is.handoff, RelayLoad(others, waiting, 1.0))
        handed = hand_over(outcome.handoff_mode, self._now_s, relay, self._is)
        if handed.first_s is None:  # it ends there: `_relay_ends` comes
            return
        live.relay_free = True
        outcome.relayed = handed.relayed
        self._at(handed.free_s, self._handed_over, live)
        first_s = handed.first_s + self._is.rtt_s / 2
        outcome.pause_s = first_s - relay.emitted_at(handed.relayed)
        self._decode_on_main(live, handed.first_s, handed.relayed)

    def _handed_over(self, live: Live) -> None:
        self._free_relay(live)

    def _decode_on_main(self, live: Live, first_s: float, relayed: int) -> None:
        """Main decode's first token is made at `first_s`; tokens cross to the gateway."""
        outcome, half_s = live.outcome, self._is.rtt_s / 2
        end_s = first_s + (outcome.answer_tokens - relayed - 1) * self._is.main_itl_s
        if not relayed:
            outcome.first_token_s = first_s + half_s
        outcome.last_token_s = end_s + half_s
        self._at(end_s, self._settle, live, live.route.main or live.route.prefill)

    def _settle(self, live: Live, name: str | None) -> None:
        """The worker holds nothing more of the request. Idempotent."""
        if name in live.unsettled:
            live.unsettled.remove(name)
            self._nodes[name].active -= 1
