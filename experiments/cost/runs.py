"""The highest request rate at which the SLA holds (`sla_rps`), by bisection over simulated rates. Deterministic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from experiments.sim.deployment import VARIANTS, Deployment
from experiments.sim.outcome import SLA_P90_S, SLA_P99_S
from experiments.sim.simulator import simulate
from experiments.traces.generate import SessionRecipe, generate_sessions
from experiments.traces.trace import Trace

STEPS = 9
MOST_PER_NODE = 0.45  # requests a second and prefill node: twice what a node can compute of them


@dataclass(frozen=True, slots=True)
class Load:
    """Traces at one request a second, each with so many warm-up requests."""

    traces: Sequence[Trace]
    warm_up: int

    @classmethod
    def make(cls, recipe: SessionRecipe, seeds: Sequence[int]) -> "Load":
        traces = [generate_sessions(replace(recipe, seed=seed, rate_per_s=1.0)) for seed in seeds]
        return cls(traces, recipe.warm_up)

    def at(self, per_s: float) -> list[Trace]:
        """The same requests, faster or slower."""
        return [
            replace(trace, requests=tuple(replace(one, time_ns=round(one.time_ns / per_s)) for one in trace.requests))
            for trace in self.traces
        ]


def at_rate(load: Load, name: str, deployment: Deployment, per_s: float) -> dict[str, Any]:
    """One row: percentiles, means over the traces, and whether the SLA holds."""
    runs = [simulate(trace, VARIANTS[name], deployment, load.warm_up) for trace in load.at(per_s)]
    p90_s, p99_s = (fmean(run.ttft_s(share) for run in runs) for share in (0.90, 0.99))
    return {
        "policy": name,
        "prefill_nodes": deployment.prefill_nodes,
        "rate_per_s": per_s,
        "p50_s": fmean(run.ttft_s(0.50) for run in runs),
        "p90_s": p90_s,
        "p99_s": p99_s,
        "met": p90_s < SLA_P90_S and p99_s < SLA_P99_S,
    }


def sla_rps(load: Load, name: str, deployment: Deployment) -> tuple[float, list[dict[str, Any]]]:
    """The rate, 0 where the SLA holds at none, and every row on the way."""
    low, high, rows = 0.0, MOST_PER_NODE * deployment.prefill_nodes, []
    for _ in range(STEPS):
        middle = (low + high) / 2
        rows.append(at_rate(load, name, deployment, middle))
        if rows[-1]["met"]:
            low = middle
        else:
            high = middle
    return low, rows
