"""How `ttft` is run: which variants, how many requests, and the scale on top of topologies/paper.yaml. Pure."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.framework.errors import ExperimentError
from experiments.framework.experiment import Part
from experiments.sim.deployment import Deployment
from experiments.sim.variants import VARIANTS
from experiments.ttft.fit import ANSWER_DIVISOR, BLOCK, REQUESTS, Fit, written_into

JUDGED = ("pdd", "cdc-pd", "idc-pd")
BESIDE = ("pdd-chunked", "cdc-pd-chunked", "pdd-end-on-rld")
WARM_UP_S, TAIL_S = 22.0, 12.0


@dataclass(frozen=True, slots=True)
class Shape:
    """`requests` a published policy, spread over the seeds. Divisors and compression: of the topology's `scale:`."""

    requests: int
    sessions: int
    prompt_divisor: int
    output_divisor: int
    time_compression: float

    def each(self, name: str, seeds: int) -> int:
        """Requests of one seed: half as many of variants that stand beside the published policies."""
        return math.ceil(self.requests / (2 if name in BESIDE else 1) / seeds)

    def seconds(self, fit: Fit, requests: int) -> float:
        """What one part takes, about."""
        return requests / fit.rate_per_s / self.time_compression + WARM_UP_S * self.sessions / 64 + TAIL_S


FULL = Shape(REQUESTS, 64, 256, ANSWER_DIVISOR, 14)
QUICK = Shape(40, 12, 256, 16, 16)


def parts(fit: Fit, shape: Shape, names: Sequence[str], seeds: int, suffix: str = "") -> list[Part]:
    """Variant by variant, since each has a lab of its own; in each, seed by seed. `suffix`: of the labs' names."""
    return [
        Part(
            f"{name}-seed{seed}",
            seed,
            shape.seconds(fit, shape.each(name, seeds)),
            {"row": name, "requests": shape.each(name, seeds)},
            variant=name + suffix,
        )
        for name in names
        for seed in range(1, seeds + 1)
    ]


def lab_topology(text: str, name: str, fit: Fit, shape: Shape) -> str:
    """topologies/paper.yaml for one variant: fitted values, scale, pipeline. Raises ExperimentError."""
    variant = VARIANTS[name]
    text = written_into(text, fit)
    changes = {
        r"(?m)^  block_tokens: .*$": f"  block_tokens: {BLOCK}",
        r"(?m)^  prompt_divisor: .*$": f"  prompt_divisor: {shape.prompt_divisor}",
        r"(?m)^  output_divisor: .*$": f"  output_divisor: {shape.output_divisor}",
        r"(?m)^  time_compression: .*$": f"  time_compression: {shape.time_compression:g}",
        r"(?m)^  pipeline: .*$": f"  pipeline: {variant.policy}\n  end_on_rld: {str(variant.end_on_rld).lower()}\n"
        f"  busy_tokens: {fit.busy_tokens}\n  kv_chunk: {Deployment().chunk_tokens}",
        r"(?m)^  kv_send: .*$": f"  kv_send: {'chunked' if variant.chunked else 'after-prefill'}",
    }
    for pattern, line in changes.items():
        text, count = re.subn(pattern, line, text)
        if count != 1:
            raise ExperimentError(
                f"topologies/paper.yaml has {count} lines {line.split(':')[0].strip()}: instead of one"
            )
    return text
