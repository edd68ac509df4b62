"""GET /metrics: Prometheus text from the gateway's requests, its connections, and what workers last said of themselves.

Names follow vLLM's where it has the quantity, with `pddbed_` for its `vllm:`.
"""

from collections.abc import Iterable

from workers.gateway.admission import Admission
from workers.gateway.dispatcher import Dispatcher
from workers.gateway.histograms import Counter, Histogram, Sample
from workers.records import RequestLog

NS_PER_S = 1e9
CACHES = ("prefill", "relay-decode", "main-decode")
WAYS = {"wan-transfer": "wan", "fabric-transfer": "fabric"}


class Requests:
    """What has become of requests: noted when every worker has let go of one."""

    def __init__(self) -> None:
        self.succeeded = Counter("finished_reason", ("stop", "length"))
        self.failed = Counter("error")
        self.prompt_tokens = 0
        self.generated = Counter("instance")
        self.ttft, self.itl, self.e2e, self.queued = Histogram(), Histogram(), Histogram(), Histogram()
        self.cache_queries, self.cache_hits = Counter("cache", CACHES), Counter("cache", CACHES)
        self.kv_bytes = Counter("way", tuple(WAYS.values()))
        self.kv_seconds, self.kv_queued = Histogram(), Histogram()

    def note(self, log: RequestLog) -> None:
        if log.error is None:
            self.succeeded.add(log.finish_reason or "stop")
        else:
            self.failed.add(log.error.partition(":")[0])
        self.prompt_tokens += log.prompt_tokens
        for instance in set(log.instances):
            self.generated.add(instance, log.instances.count(instance))
        self._times(log)
        self._spans(log)

    def _times(self, log: RequestLog) -> None:
        self.queued.observe(log.gateway_queue_ns / NS_PER_S)
        if log.token_ns:
            self.ttft.observe((log.token_ns[0] - log.start_ns) / NS_PER_S)
            for before, after in zip(log.token_ns, log.token_ns[1:], strict=False):
                self.itl.observe((after - before) / NS_PER_S)
        if log.end_ns is not None and log.error is None:
            self.e2e.observe((log.end_ns - log.start_ns) / NS_PER_S)

    def _spans(self, log: RequestLog) -> None:
        caches = {log.route.relay: "relay-decode", log.route.main: "main-decode"}
        for _, span in log.spans:
            cache = "prefill" if span.name == "prefill" else caches.get(span.peer) if span.name in WAYS else None
            if cache is not None:
                self.cache_queries.add(cache, span.tokens)
                self.cache_hits.add(cache, span.cached)
            if span.name in WAYS:
                self.kv_bytes.add(WAYS[span.name], span.bytes)
                self.kv_seconds.observe((span.end_ns - span.start_ns) / NS_PER_S)
                self.kv_queued.observe(span.queue_ns / NS_PER_S)


class Exposition:
    """The text format, version 0.0.4."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def metric(self, name: str, kind: str, meaning: str, samples: Iterable[Sample]) -> None:
        self._lines.extend((f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"))
        for suffix, labels, value in samples:
            shown = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
            self._lines.append(f"{name}{suffix}{{{shown}}} {value}" if shown else f"{name}{suffix} {value}")

    def gauge(self, name: str, meaning: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
        self.metric(name, "gauge", meaning, (("", labels, value) for labels, value in samples))

    def counter(self, name: str, meaning: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
        self.metric(name, "counter", meaning, (("", labels, value) for labels, value in samples))

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


class Metrics:
    """Everything that /metrics shows."""

    def __init__(self, dispatcher: Dispatcher, admission: Admission) -> None:
        self._dispatcher = dispatcher
        self._admission = admission
        self._requests = Requests()
        dispatcher.live.on_settled = self._requests.note

    def render(self) -> str:
        """Prometheus text exposition."""
        out = Exposition()
        self._render_requests(out)
        self._render_workers(out)
        return out.text()

    def _render_requests(self, out: Exposition) -> None:
        admission, requests = self._admission, self._requests
        out.gauge("pddbed_num_requests_running", "Requests with the workers.", [({}, admission.running)])
        out.gauge("pddbed_num_requests_waiting", "Requests that wait in the gateway.", [({}, admission.waiting)])
        out.gauge("pddbed_requests_running", "Requests not yet let go.", [({}, len(self._dispatcher.live))])
        out.counter("pddbed_requests_refused_total", "Requests there was no room for.", [({}, admission.refused)])
        for name, meaning, counter in (
            ("pddbed_request_success_total", "Answered requests.", requests.succeeded),
            ("pddbed_request_failure_total", "Failed and cancelled requests.", requests.failed),
            ("pddbed_generation_tokens_total", "Tokens, by the instance that made them.", requests.generated),
            ("pddbed_prefix_cache_queries_total", "Prompt tokens looked up, by cache.", requests.cache_queries),
            ("pddbed_prefix_cache_hits_total", "Prompt tokens found, by cache.", requests.cache_hits),
            ("pddbed_kv_transfer_bytes_total", "Bytes of KV delivered, by way.", requests.kv_bytes),
        ):
            out.metric(name, "counter", meaning, counter.samples())
        out.counter("pddbed_prompt_tokens_total", "Tokens of prompts.", [({}, requests.prompt_tokens)])
        for name, meaning, histogram in (
            ("pddbed_time_to_first_token_seconds", "Arrival to first token.", requests.ttft),
            ("pddbed_inter_token_latency_seconds", "Between tokens of an answer.", requests.itl),
            ("pddbed_e2e_request_latency_seconds", "Arrival to last token.", requests.e2e),
            ("pddbed_request_queue_time_seconds", "Wait in the gateway.", requests.queued),
            ("pddbed_kv_transfer_seconds", "One delivery of KV.", requests.kv_seconds),
            ("pddbed_kv_transfer_queue_seconds", "Wait of a delivery for a connection.", requests.kv_queued),
        ):
            out.metric(name, "histogram", meaning, histogram.samples())

    def _render_workers(self, out: Exposition) -> None:
        peers = self._dispatcher.peers
        gateway = self._dispatcher.environment.host
        links = {name: peers.link(name) for name in peers.known}
        statuses = {name: link.peer_status for name, link in links.items() if link is not None and link.peer_status}
        counters = {gateway: peers.local.counters.rows()}
        counters |= {name: status.counters for name, status in statuses.items()}
        out.gauge(
            "pddbed_worker_up",
            "Whether the gateway is connected to the worker.",
            [({"instance": name}, int(link is not None)) for name, link in links.items()],
        )
        out.gauge(
            "pddbed_kv_blocks",
            "KV blocks of a worker.",
            [
                ({"instance": name, "state": state}, value)
                for name, status in statuses.items()
                for state, value in (
                    ("free", status.free_blocks),
                    ("cached", status.cached_blocks),
                    ("used", status.blocks - status.free_blocks - status.cached_blocks),
                )
            ],
        )
        out.gauge(
            "pddbed_kv_cache_usage_perc",
            "Share of a worker's KV blocks that requests hold (1: all).",
            [
                ({"instance": name}, 1 - (status.free_blocks + status.cached_blocks) / max(1, status.blocks))
                for name, status in statuses.items()
            ],
        )
        out.counter(
            "pddbed_wire_bytes_total",
            "TCP payload bytes between workers, headers included.",
            [
                ({"instance": name, "peer": peer, "direction": direction, "class": traffic}, size)
                for name, rows in counters.items()
                for peer, direction, traffic, size, _ in rows
            ],
        )
        out.counter(
            "pddbed_unwritten_lines_total",
            "Lines of records and logs of this gateway that could not be written.",
            [({"kind": kind}, lines) for kind, lines in self._dispatcher.environment.unwritten.counts.items()],
        )
        out.gauge(
            "pddbed_wire_rtt_seconds",
            "Last round trip of a ping on the control connection.",
            [
                ({"instance": gateway, "peer": name}, link.rtt_ns / NS_PER_S)
                for name, link in links.items()
                if link is not None and link.rtt_ns is not None
            ],
        )


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
