"""The scale model: what a small lab has to emulate so that the times of a large deployment are kept. Pure.

A deployment's prompts are divided by `prompt_scale`, and cache blocks with them; a token's KV is the small model's.
Rates of links shrink by exactly the ratio of bytes, round trips stay, compute is paced to the deployment's speed. So
every time is the deployment's, and so are their ratios (`Groups`). Answers are divided by `output_scale`: a token here
stands for so many, and a decode step takes as long as theirs. `time_compression` divides every time as well.

What it does not keep, and a report has to say:
- bytes that do not scale with KV: token ids, cache notices and frame headers weigh more beside small KV;
- packets: the MTU stays, so a transfer has fewer of them, and slow start and loss act on fewer;
- whole blocks and whole tokens: a prompt is rounded to them, and what waits for a decode step waits for a scaled one;
- an unlimited fabric stays as fast as this machine;
- this machine's own time for a step, where it is longer than the deployment's: the run is late, and says so.
"""

from dataclasses import dataclass
from typing import Self


class ScaleError(Exception):
    """A scale that changes what it is to keep; the sentence has the figures."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The real thing. Rates in bits and tokens a second, times in nanoseconds."""

    kv_bytes_per_token: float
    prefill_tokens_per_s: float
    decode_step_ns: int
    wan_rate_bps: float
    rtt_ns: int
    block_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Lab:
    """Values to emulate. `prefill_tokens_per_s` is of the lab's own, scaled tokens."""

    kv_bytes_per_token: float
    prefill_tokens_per_s: float
    decode_step_ns: int
    wan_rate_bps: float
    rtt_ns: int
    block_tokens: int
    prompt_scale: int
    output_scale: int
    time_compression: float

    def prompt_tokens(self, tokens: int) -> int:
        """A deployment's prompt here; at least one token."""
        return max(1, round(tokens / self.prompt_scale))

    def output_tokens(self, tokens: int) -> int:
        return max(1, round(tokens / self.output_scale))

    def arrival_ns(self, time_ns: int) -> int:
        """Time at which a request of a trace arrives here."""
        return round(time_ns / self.time_compression)


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors of the lab's size. `output_scale`: outputs are divided by it, and a decode step takes so much longer."""

    prompt_scale: int
    output_scale: int = 1
    time_compression: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prompt_scale", "output_scale", "time_compression"):
            if getattr(self, name) < 1:
                raise ScaleError(f"{name} is {getattr(self, name)}; it divides, so it is at least 1")

    def byte_ratio(self, deployment_bytes_per_token: float, lab_bytes_per_token: float) -> float:
        """The deployment's KV of a prompt over the lab's."""
        return deployment_bytes_per_token * self.prompt_scale / lab_bytes_per_token

    def time_ns(self, ns: float) -> int:
        """A delay, a round trip, the moment of an arrival."""
        return round(ns / self.time_compression)

    def rate_bps(self, bps: float, byte_ratio: float) -> float:
        """Rate that carries the lab's bytes in the deployment's times (compressed)."""
        return bps / byte_ratio * self.time_compression

    def block_tokens(self, tokens: int) -> int:
        """A cache block. Raises ScaleError where it is not whole."""
        if tokens % self.prompt_scale:
            raise ScaleError(
                f"cache blocks of {tokens} tokens cannot be divided by prompt_scale "
                f"{self.prompt_scale}; choose a divisor, or hit rates change"
            )
        return tokens // self.prompt_scale

    def prefill_token_ns(self, tokens_per_s: float) -> float:
        """One of the lab's prompt tokens, which stands for `prompt_scale`."""
        return 1e9 / tokens_per_s * self.prompt_scale / self.time_compression

    def extend_token_ns(self, tokens_per_s: float) -> float:
        """One of the lab's answer tokens, computed with others, which stands for `output_scale`."""
        return 1e9 / tokens_per_s * self.output_scale / self.time_compression

    def decode_step_ns(self, ns: float) -> float:
        """A decode step here stands for `output_scale` of the deployment's."""
        return ns * self.output_scale / self.time_compression

    def lab(self, deployment: Deployment, kv_bytes_per_token: float) -> Lab:
        """Values to emulate with a model of so many KV bytes a token. Raises ScaleError."""
        ratio = self.byte_ratio(deployment.kv_bytes_per_token, kv_bytes_per_token)
        return Lab(
            kv_bytes_per_token=kv_bytes_per_token,
            prefill_tokens_per_s=1e9 / self.prefill_token_ns(deployment.prefill_tokens_per_s),
            decode_step_ns=round(self.decode_step_ns(deployment.decode_step_ns)),
            wan_rate_bps=self.rate_bps(deployment.wan_rate_bps, ratio),
            rtt_ns=self.time_ns(deployment.rtt_ns),
            block_tokens=self.block_tokens(deployment.block_tokens),
            prompt_scale=self.prompt_scale,
            output_scale=self.output_scale,
            time_compression=self.time_compression,
        )


@dataclass(frozen=True, slots=True)
class Groups:
    """The dimensionless numbers of a request of `prompt` tokens that misses `missed` of them, `per_s` a second."""

    transfer_over_prefill: float
    rtt_over_transfer: float
    wan_utilisation: float
    decode_over_transfer: float

    @classmethod
    def of(cls, what: Deployment | Lab, missed_tokens: float, output_tokens: float, per_s: float) -> Self:
        transfer_s = missed_tokens * what.kv_bytes_per_token * 8 / what.wan_rate_bps
        return cls(
            transfer_over_prefill=transfer_s / (missed_tokens / what.prefill_tokens_per_s),
            rtt_over_transfer=what.rtt_ns / 1e9 / transfer_s,
            wan_utilisation=per_s * transfer_s,
            decode_over_transfer=output_tokens * what.decode_step_ns / 1e9 / transfer_s,
        )
