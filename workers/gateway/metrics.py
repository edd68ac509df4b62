"""GET /metrics: Prometheus text from the gateway's requests, its connections, and what workers last said of themselves.

Names follow vLLM's where it has the quantity, with `pddbed_` for its `vllm:`.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.gateway.admission import Admission
from workers.gateway.dispatcher import Dispatcher
from workers.records import RequestLog

NS_PER_S = 1e9
CACHES = ("prefill", "relay-decode", "main-decode")
WAYS = {"wan-transfer": "wan", "fabric-transfer": "fabric"}
# vLLM's buckets, so that its dashboards fit; from a millisecond on, since `tiny` is that fast
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)

disable_created_metrics()  # type: ignore[no-untyped-call]


class Requests:
    """Counts and times of requests: noted when every worker has let go of one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, label: str, known: Sequence[str] = ()) -> Counter:
            made = Counter(name, meaning, [label], registry=registry)
            for value in known:
                made.labels(value)
            return made

        def seconds(name: str, meaning: str) -> Histogram:
            return Histogram(name, meaning, buckets=SECONDS, registry=registry)

        reasons, ways = ("stop", "length"), tuple(WAYS.values())
        self._succeeded = counter("pddbed_request_success_total", "Answered requests.", "finished_reason", reasons)
        self._failed = counter("pddbed_request_failure_total", "Failed and cancelled requests.", "error")
        made_by = "Tokens, by the instance that made them."
        self._generated = counter("pddbed_generation_tokens_total", made_by, "instance")
        looked_up, found = "Prompt tokens looked up, by cache.", "Prompt tokens found, by cache."
        self._cache_queries = counter("pddbed_prefix_cache_queries_total", looked_up, "cache", CACHES)
        self._cache_hits = counter("pddbed_prefix_cache_hits_total", found, "cache", CACHES)
        self._kv_bytes = counter("pddbed_kv_transfer_bytes_total", "Bytes of KV delivered, by way.", "way", ways)
        self._prompt_tokens = Counter("pddbed_prompt_tokens_total", "Tokens of prompts.", registry=registry)
        self._ttft = seconds("pddbed_time_to_first_token_seconds", "Arrival to first token.")
        self._itl = seconds("pddbed_inter_token_latency_seconds", "Between tokens of an answer.")
        self._e2e = seconds("pddbed_e2e_request_latency_seconds", "Arrival to last token.")
        self._queued = seconds("pddbed_request_queue_time_seconds", "Wait in the gateway.")
        self._kv_seconds = seconds("pddbed_kv_transfer_seconds", "One delivery of KV.")
        self._kv_queued = seconds("pddbed_kv_transfer_queue_seconds", "Wait of a delivery for a connection.")

    def note(self, log: RequestLog) -> None:
        if log.error is None:
            self._succeeded.labels(log.finish_reason or "stop").inc()
        else:
            self._failed.labels(log.error.partition(":")[0]).inc()
        self._prompt_tokens.inc(log.prompt_tokens)
        for instance in set(log.instances):
            self._generated.labels(instance).inc(log.instances.count(instance))
        self._times(log)
        self._spans(log)

    def _times(self, log: RequestLog) -> None:
        self._queued.observe(log.gateway_queue_ns / NS_PER_S)
        if log.token_ns:
            self._ttft.observe((log.token_ns[0] - log.start_ns) / NS_PER_S)
            for before, after in zip(log.token_ns, log.token_ns[1:], strict=False):
                self._itl.observe((after - before) / NS_PER_S)
        if log.end_ns is not None and log.error is None:
            self._e2e.observe((log.end_ns - log.start_ns) / NS_PER_S)

    def _spans(self, log: RequestLog) -> None:
        caches = {log.route.relay: "relay-decode", log.route.main: "main-decode"}
        for _, span in log.spans:
            cache = "prefill" if span.name == "prefill" else caches.get(span.peer) if span.name in WAYS else None
            if cache is not None:
                self._cache_queries.labels(cache).inc(span.tokens)
                self._cache_hits.labels(cache).inc(span.cached)
            if span.name in WAYS:
                self._kv_bytes.labels(WAYS[span.name]).inc(span.bytes)
                self._kv_seconds.observe((span.end_ns - span.start_ns) / NS_PER_S)
                self._kv_queued.observe(span.queue_ns / NS_PER_S)


class Metrics(Collector):
    """Everything that /metrics shows. Its own are the gauges and counters that others keep, read when they are asked
    for.
    """

    def __init__(self, dispatcher: Dispatcher, admission: Admission) -> None:
        self._dispatcher = dispatcher
        self._admission = admission
        self._registry = CollectorRegistry()
        self._registry.register(self)
        dispatcher.live.on_settled = Requests(self._registry).note

    def render(self) -> str:
        """Prometheus text exposition, version 0.0.4."""
        return generate_latest(self._registry).decode()

    def describe(self) -> list[Metric]:
        """None, so that nothing is collected before there is something."""
        return []

    def collect(self) -> Iterator[Metric]:
        admission = self._admission
        yield GaugeMetricFamily("pddbed_num_requests_running", "Requests with the workers.", admission.running)
        yield GaugeMetricFamily("pddbed_num_requests_waiting", "Requests that wait in the gateway.", admission.waiting)
        yield GaugeMetricFamily("pddbed_requests_running", "Requests not yet let go.", len(self._dispatcher.live))
        refused = "Requests there was no room for."
        yield CounterMetricFamily("pddbed_requests_refused_total", refused, admission.refused)
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        peers = self._dispatcher.peers
        gateway = self._dispatcher.environment.host
        links = {name: peers.link(name) for name in peers.known}
        statuses = {name: link.peer_status for name, link in links.items() if link is not None and link.peer_status}
        counters = {gateway: peers.local.counters.rows()}
        counters |= {name: status.counters for name, status in statuses.items()}
        yield _filled(
            GaugeMetricFamily(
                "pddbed_worker_up", "Whether the gateway is connected to the worker.", labels=["instance"]
            ),
            (([name], int(link is not None)) for name, link in links.items()),
        )
        yield _filled(
            GaugeMetricFamily("pddbed_kv_blocks", "KV blocks of a worker.", labels=["instance", "state"]),
            (
                ([name, state], value)
                for name, status in statuses.items()
                for state, value in (
                    ("free", status.free_blocks),
                    ("cached", status.cached_blocks),
                    ("used", status.blocks - status.free_blocks - status.cached_blocks),
                )
            ),
        )
        share = "Share of a worker's KV blocks that requests hold (1: all)."
        yield _filled(
            GaugeMetricFamily("pddbed_kv_cache_usage_perc", share, labels=["instance"]),
            (
                ([name], 1 - (status.free_blocks + status.cached_blocks) / max(1, status.blocks))
                for name, status in statuses.items()
            ),
        )
        size, labels = (
            "TCP payload bytes between workers, headers included.",
            ["instance", "peer", "direction", "class"],
        )
        yield _filled(
            CounterMetricFamily("pddbed_wire_bytes_total", size, labels=labels),
            (([name, *row[:3]], row[3]) for name, rows in counters.items() for row in rows),
        )
        unwritten = "Lines of records and logs of this gateway that could not be written."
        yield _filled(
            CounterMetricFamily("pddbed_unwritten_lines_total", unwritten, labels=["kind"]),
            (([kind], lines) for kind, lines in self._dispatcher.environment.unwritten.counts.items()),
        )
        rtt = "Last round trip of a ping on the control connection."
        yield _filled(
            GaugeMetricFamily("pddbed_wire_rtt_seconds", rtt, labels=["instance", "peer"]),
            (
                ([gateway, name], link.rtt_ns / NS_PER_S)
                for name, link in links.items()
                if link is not None and link.rtt_ns is not None
            ),
        )


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[tuple[list[str], float]]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
