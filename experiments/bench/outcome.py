"""Outcome of one request, at the client's clock, and its line for requests.jsonl. Reads chunks, knows no sockets.

As `vllm bench serve` measures: `ttft` and every `itl` from chunk to chunk, connecting included; `e2el` until the last
token; `tpot` is what lies between, over the tokens after the first. Other than there, a chunk has to have a token:
servers begin a stream with a role or an empty text long before the first one, and keep it alive with empty chunks.
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
    empty_ns: list[int] = field(default_factory=list)
    """Chunks behind the first token that show none: half a character, or nothing but a sign of life."""
    empty_end_ns: int | None = None
    """The chunk that ends the answer, where it shows no token: an end token, or none."""
    usage: int | None = None
    prompt_usage: int | None = None
    cached_usage: int | None = None
    finish_reason: str | None = None
    end_ns: int = 0
    done: bool = False
    reason: str = ""
    message: str = ""
    asked_tokens: int | None = None
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
        usage = chunk.get("usage")
        counted = self._note_usage(usage) if usage else 0
        choices = chunk.get("choices") if usage else chunk["choices"]
        if not choices:
            return
        choice, pdd = choices[0], chunk.get("pdd")
        ids = len((pdd or {}).get("token_ids") or choice.get("token_ids") or ()) or counted
        finish = choice.get("finish_reason")
        if ids or (pdd is None and _text(choice)):
            self.chunk_ns.append(now_ns)
            self.tokens += ids or 1
        elif pdd is None and self.chunk_ns:
            if finish:
                self.empty_end_ns = now_ns
            else:
                self.empty_ns.append(now_ns)
        self.finish_reason = finish or self.finish_reason
        self.request_id = self.request_id or str(chunk.get("id", ""))
        self.record = (pdd or {}).get("record", self.record)

    def _note_usage(self, usage: Mapping[str, Any]) -> int:
        """Number of new tokens by a server's count that goes with each chunk; 0 where it only stands at the end."""
        self.prompt_usage = usage.get("prompt_tokens", self.prompt_usage)
        self.cached_usage = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached_usage)
        if not (now := int(usage.get("completion_tokens") or 0)):
            return 0
        before, self.usage = self.usage or self.tokens, now
        return max(0, now - before)

    def finish(self, now_ns: int) -> None:
        """The stream is over: was it an answer?"""
        self.end_ns = now_ns
        self._place_empty()
        if not self.reason and self.finish_reason is None:
            self.fail("broke off", "the connection ended before the answer did")
        if not self.reason and not self.chunk_ns:
            self.fail("no token", "an answer without a token")
        self.done = True

    def _place_empty(self) -> None:
        """Empty chunks were tokens where the server counts as many more as there are, or does not count."""
        if self.usage is None or len(self.empty_ns) <= self.usage - self.tokens:
            self.chunk_ns = sorted([*self.chunk_ns, *self.empty_ns])
            self.tokens += len(self.empty_ns)
        if self.empty_end_ns is not None and self.usage == self.tokens + 1:
            self.chunk_ns.append(self.empty_end_ns)
            self.tokens += 1

    @property
    def output_tokens(self) -> int:
        """As the server counts them, where it does."""
        return self.usage or self.tokens

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
            "pdd_asked_tokens": self.asked_tokens,
            "pdd_counted": bool(self.usage),
            "pdd_prompt_tokens": self.prompt_usage,
            "pdd_cached_tokens": self.cached_usage,
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
        """Spans for a server that tells nothing of itself: what the client saw, for the timeline."""
        first_ns = self.chunk_ns[0] if self.chunk_ns else self.end_ns
        spans = [{"name": "first token", "start_ns": self.start_ns, "end_ns": first_ns}]
        if last_ns > first_ns:
            spans.append({"name": "answer", "start_ns": first_ns, "end_ns": last_ns})
        return spans


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a chunk; a chat's delta, too, for servers that answer every endpoint so."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


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
