"""Outcome of a simulated request, and the summary of many. Pure values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.framework.figures import percentile


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds since the trace began; hit rates are of the prompt, when it was looked up."""

    index: int
    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    pipeline: str = ""
    prefill: str = ""
    p_hit: float = 0.0
    md_hit: float | None = None
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    kv_bytes: float = 0.0
    kv_queue_s: float | None = None
    kv_xfer_s: float | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    relayed: int = 0
    handoff_mode: str = ""
    pause_s: float | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> float:
        return self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """None for answers of one token."""
        if self.answer_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.answer_tokens - 1)


@dataclass(frozen=True)
class Run:
    """A variant's outcomes in the order of the trace, the warm-up left out."""

    variant: str
    outcomes: Sequence[Outcome]

    def ttft_s(self, share: float) -> float:
        return percentile([outcome.ttft_s for outcome in self.outcomes], share)

    @property
    def relay_share(self) -> float:
        """Share of all tokens: those that a relay made and main decode did not."""
        return sum(one.relayed for one in self.outcomes) / sum(one.answer_tokens for one in self.outcomes)

    @property
    def meets_sla(self) -> bool:
        """The publication's: P90 below 10 s and P99 below 15 s to the first token."""
        return self.ttft_s(0.90) < SLA_P90_S and self.ttft_s(0.99) < SLA_P99_S

    def summary(self) -> dict[str, Any]:
        """vllm's flat names in milliseconds, and this testbed's."""
        found: dict[str, Any] = {
            "completed": len(self.outcomes),
            **_spread("ttft_ms", [one.ttft_s * 1000 for one in self.outcomes]),
            **_spread("tpot_ms", [tpot * 1000 for one in self.outcomes if (tpot := one.tpot_s) is not None]),
            **_spread("e2el_ms", [one.e2el_s * 1000 for one in self.outcomes]),
            **_spread("kv_xfer_ms", [one.kv_xfer_s * 1000 for one in self.outcomes if one.kv_xfer_s is not None]),
            **_spread("kv_queue_ms", [one.kv_queue_s * 1000 for one in self.outcomes if one.kv_queue_s is not None]),
            **_spread("prefill_queue_ms", [one.prefill_queue_s * 1000 for one in self.outcomes]),
            "mean_p_hit": _mean([one.p_hit for one in self.outcomes]),
            "mean_md_hit": _mean([one.md_hit for one in self.outcomes if one.md_hit is not None]),
            "relay_pipeline_share": _mean([float(one.pipeline == "p-rld-md") for one in self.outcomes]),
            "rld_token_share": self.relay_share,
            "kv_bytes": sum(one.kv_bytes for one in self.outcomes),
            "meets_sla": self.meets_sla,
        }
        return found


SLA_P90_S, SLA_P99_S = 10.0, 15.0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    found = {f"{word}_{name}": percentile(values, share) if values else None for word, share in shares.items()}
    return {f"mean_{name}": _mean(values), **found}
