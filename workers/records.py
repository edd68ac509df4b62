"""The record of a request: one JSON line, vllm bench's names for what it has and `pdd_*` for the rest."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.linefile import MOST_BYTES, LineFile, Unwritten
from workers.policy import Route
from workers.wire.messages import Span

NS_PER_MS = 1e6
NS_PER_S = 1e9


@dataclass
class RequestLog:
    """Everything the gateway notes of one request. Times are CLOCK_MONOTONIC nanoseconds.

    All namespaces of a lab share that clock, so spans of different workers can be compared.
    """

    request: str
    model: str
    route: Route
    prompt_tokens: int
    handoff: str
    start_time: float  # Unix seconds, for people
    start_ns: int
    token_ns: list[int] = field(default_factory=list)
    instances: list[str] = field(default_factory=list)
    spans: list[tuple[str, Span]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    end_ns: int | None = None
    unsettled: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    """By worker: whose token it is when another worker of its role took over."""
    replays: int = 0
    recovery: list[dict[str, Any]] = field(default_factory=list)
    """Each loss: when, after how many tokens, of whom, why, and who went on."""
    gateway_queue_ns: int = 0
    """Time that the request waited in the gateway for others to end, `start_ns` being before that."""
    spliced: int | None = None
    """Tokens of a chat's earlier turns that stand in the prompt as generated, where text would have become others."""
    retokenised: int | None = None
    """Tokens of a chat's earlier turns that came back as others, so that no cache knows them from there on."""

    def find(self, name: str) -> Span | None:
        """The first span of that name, of whichever worker."""
        return next((span for _, span in self.spans if span.name == name), None)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that prefill had in its cache, as far as it has reported."""
        prefill = self.find("prefill")
        return prefill.cached if prefill else 0

    def record(self) -> dict[str, Any]:
        """The line for requests.jsonl: seconds in vllm's fields, milliseconds in `pdd_*_ms`."""
        end_ns = self.end_ns or (self.token_ns[-1] if self.token_ns else self.start_ns)
        first_ns = self.token_ns[0] if self.token_ns else None
        itl = [(b - a) / NS_PER_S for a, b in zip(self.token_ns, self.token_ns[1:], strict=False)]
        output_len = len(self.token_ns)
        return {
            "request_id": self.request,
            "model": self.model,
            "success": self.error is None,
            "error": self.error or "",
            "start_time": self.start_time,
            "input_len": self.prompt_tokens,
            "output_len": output_len,
            "ttft": None if first_ns is None else (first_ns - self.start_ns) / NS_PER_S,
            "tpot": sum(itl) / len(itl) if itl else None,
            "itl": itl,
            "e2el": (end_ns - self.start_ns) / NS_PER_S,
            "finish_reason": self.finish_reason,
            "pdd_pipeline": self.route.pipeline,
            "pdd_route_reason": self.route.reason,
            "pdd_prefill": self.route.prefill,
            "pdd_relay": self.route.relay,
            "pdd_main": self.route.main,
            "pdd_hit_rate": self.route.hit_rate,
            "pdd_replays": self.replays,
            "pdd_recovery": list(self.recovery),
            "pdd_gateway_queue_ms": self.gateway_queue_ns / NS_PER_MS,
            "pdd_spliced_tokens": self.spliced,
            "pdd_retokenised_tokens": self.retokenised,
            **self._transfers(),
            **self._handoff(),
            "pdd_start_ns": self.start_ns,
            "pdd_end_ns": end_ns,
            "pdd_unsettled": list(self.unsettled),
            "pdd_spans": [span_row(instance, span) for instance, span in self.spans],
        }

    def _transfers(self) -> dict[str, Any]:
        wan, fabric, prefill = self.find("wan-transfer"), self.find("fabric-transfer"), self.find("prefill")
        kv = wan or fabric
        waits = [span for _, span in self.spans if span.name == "memory-wait"]
        return {
            "pdd_p_hit": _share(prefill),
            "pdd_rld_hit": _share(self._to(self.route.relay)),
            "pdd_md_hit": _share(self._to(self.route.main)),
            # how long the KV waited for memory of a decode worker, the longer wait of two
            "pdd_memory_wait_ms": max((s.end_ns - s.start_ns for s in waits), default=0) / NS_PER_MS,
            "pdd_kv_repairs": sum(span.name == "kv-repair" for _, span in self.spans),
            "pdd_delta_bytes": wan.bytes if wan else None,
            "pdd_kv_queue_ms": wan.queue_ns / NS_PER_MS if wan else None,
            "pdd_kv_xfer_ms": (wan.end_ns - wan.start_ns) / NS_PER_MS if wan else None,
            "pdd_kv_send": None if kv is None else "chunked" if kv.chunks else "after-prefill",
            "pdd_kv_dtype": wan.encoding or "same" if wan else None,
            "pdd_kv_wait_ms": wan.waited_ns / NS_PER_MS if wan else None,
            # what the transfer to main decode adds to prefill: all of it, or with chunked sending its end
            "pdd_kv_exposed_ms": max(0, wan.end_ns - prefill.end_ns) / NS_PER_MS if wan and prefill else None,
            "pdd_fabric_bytes": fabric.bytes if fabric else None,
            "pdd_fabric_queue_ms": fabric.queue_ns / NS_PER_MS if fabric else None,
            "pdd_fabric_xfer_ms": (fabric.end_ns - fabric.start_ns) / NS_PER_MS if fabric else None,
        }

    def _to(self, peer: str | None) -> Span | None:
        """The transfer of KV to a decode worker."""
        transfers = (span for _, span in self.spans if span.name in ("wan-transfer", "fabric-transfer"))
        return next((span for span in transfers if span.peer == peer), None)

    def _handoff(self) -> dict[str, Any]:
        wait, extend, stop = self.find("hand-over"), self.find("extend"), self.find("relay-stop")
        ids, kv, hold = self.find("relay-ids"), self.find("relay-kv"), self.find("relay-hold")
        return {
            "pdd_handoff_mode": stop.mode if stop else None,
            "pdd_handoff_reason": stop.reason if stop else None,
            # main decode ready -> its first token
            "pdd_handoff_ms": (extend.end_ns - wait.start_ns) / NS_PER_MS if wait and extend else None,
            "pdd_handoff_pause_ms": self._pause_ms(),
            "pdd_handoff_rounds": wait.rounds if wait else None,
            "pdd_handoff_recomputed": extend.tokens if extend else None,
            # what the relay sent main decode of the answer: whole frames of ids, bytes of KV
            "pdd_handoff_id_bytes": ids.bytes if ids else None,
            "pdd_handoff_kv_bytes": kv.bytes if kv else 0 if ids else None,
            # how long the relay held the request's memory
            "pdd_rld_hold_ms": (hold.end_ns - hold.start_ns) / NS_PER_MS if hold else None,
            "pdd_rld_tokens": self._tokens_of("relay-decode"),
            "pdd_md_tokens": self._tokens_of("main-decode"),
            # speculative decoding: tokens guessed, and those of them that held
            "pdd_drafted_tokens": sum(span.drafted for _, span in self.spans),
            "pdd_accepted_tokens": sum(span.accepted for _, span in self.spans),
            "pdd_preemptions": sum(span.preempted for _, span in self.spans),
        }

    def _pause_ms(self) -> float | None:
        """The client's pause: the gap before a main decode's token that follows a relay's, the longest of several."""
        roles = [self.roles.get(instance) for instance in self.instances]
        pauses = [
            self.token_ns[i] - self.token_ns[i - 1]
            for i in range(1, len(roles))
            if roles[i - 1] == "relay-decode" and roles[i] == "main-decode"
        ]
        return max(pauses) / NS_PER_MS if pauses else None

    def _tokens_of(self, role: str) -> int:
        return sum(self.roles.get(instance) == role for instance in self.instances)


def _share(span: Span | None) -> float | None:
    """The share of a span's tokens a cache had; None when there is no span."""
    return span.cached / span.tokens if span is not None and span.tokens else None


def span_row(instance: str, span: Span) -> dict[str, Any]:
    """A span as it stands in records: zero details left out."""
    row: dict[str, Any] = {
        "name": span.name,
        "instance": instance,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
    }
    for detail in (
        "peer",
        "bytes",
        "tokens",
        "cached",
        "queue_ns",
        "chunks",
        "waited_ns",
        "encoding",
        "rounds",
        "drafted",
        "accepted",
        "preempted",
        "mode",
        "reason",
    ):
        if value := getattr(span, detail):
            row[detail] = value
    return row


class RecordWriter:
    """Appends lines to `requests.jsonl` in a directory (None: nowhere); `LineFile` says what becomes of a full disk."""

    def __init__(self, directory: Path | None, unwritten: Unwritten, most_bytes: int = MOST_BYTES) -> None:
        self._file: LineFile | None = None
        if directory is not None:
            self._file = LineFile(directory / "requests.jsonl", "requests", unwritten, most_bytes, self._last_line)
            self._file.make()
        self._most_bytes = most_bytes

    def write(self, record: dict[str, Any]) -> None:
        """Append a request's line. Never fails: what cannot be written is counted."""
        if self._file is not None:
            self._file.write(json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _last_line(self) -> bytes:
        said = f"requests.jsonl has reached its limit of {self._most_bytes} bytes (PDDBED_RECORDS_LIMIT)"
        return json.dumps(
            {"request_id": "", "success": False, "error": f"{said}; later requests have no line"}
        ).encode()
