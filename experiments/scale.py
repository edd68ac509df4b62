"""The scale model (DESIGN 8): what a small lab has to emulate so that the times of a large deployment are kept. Pure.

A deployment's prompts are divided by `prompt_scale`, and cache blocks with them; a token's KV is the small model's.
Rates of links shrink by exactly the ratio of bytes, round trips stay, compute is paced to the deployment's speed. So
every time is the deployment's, and so are their ratios (`Groups`). `time_compression` divides every time as well.

What it does not keep, and a report has to say:
- bytes that do not scale with KV: token ids, cache notices and frame headers weigh more beside small KV;
- packets: the MTU stays, so a transfer has fewer of them, and slow start and loss act on fewer;
- whole blocks and whole tokens: a prompt is rounded to them (`share_moved` says what that does to hit rates);
- this machine's own time for a step, where it is longer than the deployment's: the run is late, and says so.
"""

from dataclasses import dataclass, replace
from typing import Self

from experiments.traces.stats import HIGH, hits
from experiments.traces.trace import Request, Trace, blocks_of

MOST_SHARE_MOVED = 0.01  # of requests that change sides of the 95 % threshold


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
    """What to emulate. `prefill_tokens_per_s` is of the lab's own, scaled tokens."""

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
        """When a request of a trace arrives here."""
        return round(time_ns / self.time_compression)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much smaller. `output_scale`: outputs are divided by it, and a decode step takes so much longer."""

    prompt_scale: int
    output_scale: int = 1
    time_compression: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prompt_scale", "output_scale", "time_compression"):
            if getattr(self, name) < 1:
                raise ScaleError(f"{name} is {getattr(self, name)}; it divides, so it is at least 1")

    def byte_ratio(self, deployment: Deployment, kv_bytes_per_token: float) -> float:
        """The deployment's KV of a prompt over the lab's."""
        return deployment.kv_bytes_per_token * self.prompt_scale / kv_bytes_per_token

    def lab(self, deployment: Deployment, kv_bytes_per_token: float) -> Lab:
        """What to emulate with a model of so many KV bytes a token. Raises ScaleError."""
        if deployment.block_tokens % self.prompt_scale:
            raise ScaleError(
                f"cache blocks of {deployment.block_tokens} tokens cannot be divided by prompt_scale "
                f"{self.prompt_scale}; choose a divisor, or hit rates change"
            )
        faster = self.time_compression
        return Lab(
            kv_bytes_per_token=kv_bytes_per_token,
            prefill_tokens_per_s=deployment.prefill_tokens_per_s / self.prompt_scale * faster,
            decode_step_ns=round(deployment.decode_step_ns * self.output_scale / faster),
            wan_rate_bps=deployment.wan_rate_bps / self.byte_ratio(deployment, kv_bytes_per_token) * faster,
            rtt_ns=round(deployment.rtt_ns / faster),
            block_tokens=deployment.block_tokens // self.prompt_scale,
            prompt_scale=self.prompt_scale,
            output_scale=self.output_scale,
            time_compression=faster,
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


def scaled_trace(trace: Trace, lab: Lab) -> Trace:
    """The requests as the lab gets them: prompts, blocks, outputs and arrival times divided.

    Blocks keep their ids when they are divided as prompts are; otherwise each of the lab's larger blocks takes the id
    of the last of the trace's that it covers, which names everything before it.
    """
    requests = tuple(_scaled(request, trace.block_tokens, lab) for request in trace.requests)
    return replace(trace, requests=requests, block_tokens=lab.block_tokens)


def _scaled(request: Request, block_tokens: int, lab: Lab) -> Request:
    tokens = lab.prompt_tokens(request.input_tokens)
    ids = []
    for index in range(blocks_of(tokens, lab.block_tokens)):
        last_token = min((index + 1) * lab.block_tokens, tokens) * lab.prompt_scale
        covered = min(blocks_of(last_token, block_tokens), len(request.blocks))
        if covered:
            ids.append(request.blocks[covered - 1])
    return replace(
        request,
        time_ns=lab.arrival_ns(request.time_ns),
        input_tokens=tokens,
        output_tokens=lab.output_tokens(request.output_tokens),
        blocks=tuple(ids),
    )


def share_moved(trace: Trace, lab: Lab) -> float:
    """By how much the scale moves the share of requests above 95 % hit (as a share of requests, signed)."""
    return _share_above(scaled_trace(trace, lab)) - _share_above(trace)


def check_trace(trace: Trace, lab: Lab) -> None:
    """Raises ScaleError when the scale moves the trace's share of high hits by more than one point."""
    moved = share_moved(trace, lab)
    if abs(moved) > MOST_SHARE_MOVED:
        raise ScaleError(
            f"a prompt_scale of {lab.prompt_scale} with blocks of {lab.block_tokens} tokens moves the share of "
            f"requests above 95 % hit by {100 * moved:+.1f} points; divide the blocks by as much as the prompts, or "
            "scale less"
        )


def _share_above(trace: Trace) -> float:
    return sum(hit.rate > HIGH for hit in hits(trace)) / len(trace.requests)
