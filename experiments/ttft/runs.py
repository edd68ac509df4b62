"""Runs of `ttft`: variants, numbers of requests, the scale on top of topologies/paper.yaml, and a lab's results.

Caches are filled, a seed's requests replayed, and what workers, packets and pacing say is gathered.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.framework.base import Part, PartResult, Progress
from experiments.framework.checks import PaceSince, check_bytes
from experiments.framework.figures import percentile
from experiments.framework.lab import ExperimentLab
from experiments.framework.requests import LabRecords
from experiments.sim.deployment import VARIANTS, Deployment
from experiments.ttft.fit import BLOCK, Fit, as_written
from experiments.ttft.load import Answered, Load, Sent, Shape, workload
from testbed.topology.overlay import Overlay


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


def variation(name: str, fit: Fit, shape: Shape) -> Overlay:
    """Overlay on topologies/paper.yaml in a variant's lab: fitted values, scale, pipeline."""
    variant = VARIANTS[name]
    return {
        **as_written(fit),
        "scale.block_tokens": BLOCK,
        "scale.prompt_divisor": shape.prompt_divisor,
        "scale.output_divisor": shape.output_divisor,
        "scale.time_compression": float(shape.time_compression),
        "serving.pipeline": variant.policy,
        "serving.end_on_rld": variant.end_on_rld,
        "serving.busy_tokens": fit.busy_tokens,
        "serving.kv_chunk": Deployment().chunk_tokens,
        "serving.kv_send": "chunked" if variant.chunked else "after-prefill",
    }


LATEST_P99_MS = 20.0  # of sending a request, in the lab's time
FILL_AT_ONCE, FILL_CHUNKED_AT_ONCE = 12, 4  # with more, workers of small steps are late before anything counts
FILL_ANSWER_TOKENS = 96  # long enough to outlast its prompt's KV on the WAN, so that main decode has it in any variant
SPANS_OF = 100  # requests of a part whose spans are kept: a timeline of all of them nobody could open


class TtftSession:
    """One variant's lab."""

    def __init__(self, lab: ExperimentLab, fit: Fit, shape: Shape) -> None:
        self._lab = lab
        self._fit = fit
        self._shape = shape
        self._load = Load(lab.state["api"], str(lab.plan.model["name"]))
        self._records = LabRecords(lab.record.results / "requests.jsonl")

    def run(self, part: Part, directory: Path, progress: Progress) -> PartResult:
        capture = directory / "wan0.pcapng"
        work = workload(self._fit, self._shape, part.seed, part.detail["requests"])
        begun = time.monotonic()
        at_once = FILL_CHUNKED_AT_ONCE if VARIANTS[part.detail["row"]].chunked else FILL_AT_ONCE
        filled = self._load.fill(work.warm_up, at_once, FILL_ANSWER_TOKENS)
        lost = [one.error for one in filled if one.name is None]
        lost += [record["error"] for record in self._records.take(_named(filled)).values() if not record["success"]]
        filled_s = time.monotonic() - begun
        pace, cpu = PaceSince(self._lab.record.results), _cpu_s()
        begun = time.monotonic()
        with self._lab.capturing("wan0", capture):
            answered = self._load.replay(work.measured, lambda done: progress(done / len(work.measured)))
            found = self._records.take(_named(answered))
        seconds = time.monotonic() - begun
        used = _cpu_s()
        check = check_bytes(capture, self._lab.record.results)
        late_ms = percentile([one.late_ns / 1e6 for one in answered], 0.99)
        failed = [one.error for one in answered if one.name is None]
        failed += [record["error"] for record in found.values() if not record["success"]]
        reasons = check.reasons
        if late_ms > LATEST_P99_MS:
            reasons.append(f"requests were sent late, p99 {late_ms:.0f} ms (limit {LATEST_P99_MS:.0f} ms)")
        if lost:
            reasons.append(f"{len(lost)} of {len(filled)} prompts did not fill the caches, the first: {lost[0]}")
        if failed:
            reasons.append(f"{len(failed)} of {len(answered)} requests failed, the first: {failed[0]}")
        facts = {
            **check.facts(),
            "late_p99_ms": late_ms,
            "failed": len(failed),
            "seconds": seconds,
            "fill_seconds": filled_s,
            "cpu_share": {"busy": (used[0] - cpu[0]) / seconds / _CPUS, "stolen": (used[1] - cpu[1]) / seconds / _CPUS},
            "pace": pace.facts(),
            "trace_sha256": work.trace.sha256,
        }
        records = [
            self._row(part, index, what, found[one.name])
            for index, (what, one) in enumerate(zip(work.measured, answered, strict=True))
            if one.name is not None and found[one.name]["success"]
        ]
        return PartResult(records, facts, reasons)

    def _row(self, part: Part, index: int, what: Sent, record: dict[str, Any]) -> dict[str, Any]:
        """A line of requests.jsonl. `..._ms` without pdd_ are the deployment's times, everything else is the lab's."""
        faster = self._shape.time_compression
        tokens = record["output_len"] * self._shape.output_divisor
        after_first_s = record["e2el"] - record["ttft"]
        kept = {key: value for key, value in record.items() if key != "itl" and (value or key != "pdd_recovery")}
        if index >= SPANS_OF:
            kept.pop("pdd_spans")
        return {
            **kept,
            "part": part.name,
            "row": part.detail["row"],
            "seed": part.seed,
            "index": index,
            "arrival_s": what.request.time_ns / 1e9,
            "ttft_ms": record["ttft"] * 1000 * faster,
            "tpot_ms": after_first_s * 1000 * faster / (tokens - 1) if record["output_len"] > 1 else None,
            "e2el_ms": record["e2el"] * 1000 * faster,
            "kv_xfer_ms": _times(record["pdd_kv_xfer_ms"], faster),
            "kv_queue_ms": _times(record["pdd_kv_queue_ms"], faster),
        }


def _times(value: float | None, faster: float) -> float | None:
    return None if value is None else value * faster


def _named(answered: Sequence[Answered]) -> list[str]:
    return [one.name for one in answered if one.name is not None]


_CPUS = os.cpu_count() or 1


def _cpu_s() -> tuple[float, float]:
    """Seconds that all CPUs were busy, and stolen by the machine below, since boot."""
    with open("/proc/stat") as stream:
        user, nice, system, _, _, irq, softirq, steal = map(int, stream.readline().split()[1:9])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick


@contextmanager
def open_session(lab: ExperimentLab, fit: Fit, shape: Shape) -> Iterator[TtftSession]:
    yield TtftSession(lab, fit, shape)
