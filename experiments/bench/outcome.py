"""What came of one request, at the client's clock, and its line for requests.jsonl. Reads chunks, knows no sockets.

As `vllm bench serve` measures: `ttft` and every `itl` from chunk to chunk, connecting included; `e2el` until the last
token; `tpot` is what lies between, over the tokens after the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NS_PER_S = 1e9
NS_PER_MS = 1e6


@dataclass(slots=True)
class Outcome:
    """Times are CLOCK_MONOTONIC nanoseconds. `late_ns`: after it was due, None where nothing was due; `held_ns`: waited
    for --concurrency or --in-turn. `reason`: of a failure, in a word or two, for counting; `message`: the server's own.
    """

    index: int
    input_tokens: int
    due_ns: int | None = None
    start_ns: int = 0
    start_time: float = 0.0
    late_ns: int | None = None
    held_ns: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    tokens: int = 0
    usage: int | None = None
    finish_reason: str | None = None
    end_ns: int = 0
    done: bool = False
    reason: str = ""
    message: str = ""
    request_id: str = ""
    record: Mapping[str, Any] | None = None

    @property
    def success(self) -> bool:
        return self.done and not self.reason

    def fail(self, reason: str, message: str) -> None:
        """The first failure stands."""
        if not self.reason:
            self.reason, self.message = reason, message

    def take(self, chunk: Mapping[str, Any], now_ns: int) -> None:
        """One event of the stream. Raises LookupError, TypeError, AttributeError where it is none of OpenAI's."""
        if (error := chunk.get("error")) is not None:
            self.fail(*named_error(error))
            return
        if (usage := chunk.get("usage")) is not None:
            self.usage = int(usage["completion_tokens"])
        if not chunk["choices"]:
            return
        choice, pdd = chunk["choices"][0], chunk.get("pdd") or {}
        ids = pdd.get("token_ids")
        finish = choice.get("finish_reason")
        if ids or (not pdd and (choice.get("text") or finish is None)):
            self.chunk_ns.append(now_ns)
            self.tokens += len(ids) if ids else 1
        self.finish_reason = finish or self.finish_reason
        self.request_id = self.request_id or str(chunk.get("id", ""))
        self.record = pdd.get("record", self.record)

    def finish(self, now_ns: int) -> None:
        """The stream is over: was it an answer?"""
        self.end_ns = now_ns
        if not self.reason and self.finish_reason is None:
            self.fail("broke off", "the connection ended before the answer did")
        if not self.reason and not self.chunk_ns:
            self.fail("no token", "an answer without a token")
        self.done = True

    @property
    def output_tokens(self) -> int:
        """As the server counts them, where it does."""
        return self.tokens if self.usage is None else self.usage

    def row(self, begin_ns: int) -> dict[str, Any]:
        """vllm's names in seconds; `pdd_*_s` are counted from the run's beginning."""
        last_ns = self.chunk_ns[-1] if self.success else self.end_ns
        ttft = (self.chunk_ns[0] - self.start_ns) / NS_PER_S if self.chunk_ns else None
        e2el = (last_ns - self.start_ns) / NS_PER_S
        tpot = (e2el - ttft) / (self.output_tokens - 1) if ttft is not None and self.output_tokens > 1 else None
        row: dict[str, Any] = {
            "request_id": self.request_id,
            "success": self.success,
            "error": self.message,
            "pdd_failure": self.reason,
            "start_time": self.start_time,
            "input_len": self.input_tokens,
            "output_len": self.output_tokens,
            "ttft": ttft,
            "tpot": tpot,
            "itl": [(b - a) / NS_PER_S for a, b in zip(self.chunk_ns, self.chunk_ns[1:], strict=False)],
            "e2el": e2el,
            "finish_reason": self.finish_reason,
            "pdd_index": self.index,
            "pdd_due_s": None if self.due_ns is None else self.due_ns / NS_PER_S,
            "pdd_start_s": (self.start_ns - begin_ns) / NS_PER_S,
            "pdd_end_s": (self.end_ns - begin_ns) / NS_PER_S,
            "pdd_late_ms": None if self.late_ns is None else self.late_ns / NS_PER_MS,
            "pdd_held_ms": self.held_ns / NS_PER_MS,
        }
        if self.record is None:
            row["pdd_spans"] = self._spans(last_ns)
        return row

    def _spans(self, last_ns: int) -> list[dict[str, Any]]:
        """Of a server that tells nothing of itself: what the client saw, for the timeline."""
        first_ns = self.chunk_ns[0] if self.chunk_ns else self.end_ns
        spans = [{"name": "first token", "start_ns": self.start_ns, "end_ns": first_ns}]
        if last_ns > first_ns:
            spans.append({"name": "answer", "start_ns": first_ns, "end_ns": last_ns})
        return spans


def named_error(error: Any) -> tuple[str, str]:
    """A failure's name and message, from OpenAI's error object or whatever stands in its place."""
    if not isinstance(error, Mapping):
        return "error", str(error)[:300]
    name = error.get("code") or error.get("type") or "error"
    return str(name)[:60], str(error.get("message", error))[:300]


def merge(row: dict[str, Any], record: Mapping[str, Any]) -> None:
    """Adds what the gateway noted of the same request: its `pdd_*`, and its own view of the times."""
    row.update({key: value for key, value in record.items() if key.startswith("pdd_")})
    row["model"] = record.get("model")
    row["pdd_gateway_ttft"] = record.get("ttft")
    row["pdd_gateway_e2el"] = record.get("e2el")
