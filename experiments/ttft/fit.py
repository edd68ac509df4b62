"""The fitted parameters of `ttft`, and the deployment and the trace that follow. `fit.json` says how they were found.

Four free parameters for four published figures: prefill speed (PDD's P90), a connection's bandwidth (CDC-PD's P90), the
context cap (PDD's P99), the relay's time for a token (its share of all tokens). Everything else is assumed or
published, and stands in the file beside them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from experiments.framework.base import ExperimentError
from experiments.framework.directory import edit_topology, write_whole
from experiments.sim.deployment import VARIANTS, Deployment
from experiments.sim.outcome import Run
from experiments.sim.simulator import simulate
from experiments.traces.generate import SessionRecipe, generate_sessions
from experiments.traces.trace import Trace

FIT_FILE = Path(__file__).parent / "fit.json"
TOPOLOGY = Path(__file__).resolve().parents[2] / "topologies" / "paper.yaml"
FIT_SEEDS = range(101, 149)  # draws that no run uses
REQUESTS = 3000  # a policy, in all seeds together
FIT_REQUESTS = 1000  # a seed, as in a run of three
ANSWER_DIVISOR = 8  # a lab's token stands for so many, and takes as long; the relay's share is fitted for such tokens
TARGET_PDD_P90_S, TARGET_PDD_P99_S = 9.8, 14.4
TARGET_CDC_P90_S, TARGET_CDC_P99_S = 18.3, 30.0
TARGET_SHARE = 0.062
MOST_ROUNDS = 20
CLOSE = 0.008  # relative: well below the 2 % that seeds differ by
BLOCK = 1024  # tokens; the context cap is whole blocks


@dataclass(frozen=True, slots=True)
class Fit:
    """`relay_itl_s`: a token on a GPU of kind A; chip E's is 1 / 2.1 of it, its prefill 81 % of A's (published).

    `lab_adds_s`: measured; so much later than simulated a first token comes in the lab: this machine's milliseconds,
    times the compression. What is fitted is what the lab shows.
    """

    prefill_tokens_per_s: float
    connection_bytes_per_s: float
    context_tokens: int
    relay_itl_s: float
    rate_per_s: float
    sessions: int
    prefill_nodes: int
    connections: int
    kv_bytes_per_token: float
    rtt_s: float
    busy_tokens: int
    lab_adds_s: float
    how: str

    @classmethod
    def read(cls, file: Path = FIT_FILE) -> Self:
        return cls(**json.loads(file.read_text()))

    def deployment(self) -> Deployment:
        return Deployment(
            prefill_nodes=self.prefill_nodes,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            main_prefill_tokens_per_s=self.prefill_tokens_per_s * CHIP_E_PREFILL,
            relay_itl_s=self.relay_itl_s,
            main_itl_s=self.relay_itl_s / CHIP_E_DECODE,
            kv_bytes_per_token=self.kv_bytes_per_token,
            connections=self.connections,
            connection_bytes_per_s=self.connection_bytes_per_s,
            rtt_s=self.rtt_s,
            busy_tokens=self.busy_tokens,
            context_tokens=self.context_tokens,
        )

    def recipe(self, seed: int, requests: int, sessions: int | None = None) -> SessionRecipe:
        return SessionRecipe(requests, sessions or self.sessions, self.context_tokens, BLOCK, self.rate_per_s, seed)

    def trace(
        self, seed: int, requests: int, context_tokens: int | None = None, rate: float | None = None
    ) -> tuple[Trace, int]:
        """A generated trace and how many of its first requests only fill the caches."""
        recipe = self.recipe(seed, requests)
        context_tokens = context_tokens or self.context_tokens
        recipe = replace(recipe, context_tokens=context_tokens, rate_per_s=rate or self.rate_per_s)
        return generate_sessions(recipe), recipe.warm_up


CHIP_E_PREFILL, CHIP_E_DECODE = 0.81, 2.10


def predicted(fit: Fit, name: str, recipe: SessionRecipe, answer_divisor: int) -> Run:
    """Run of the simulator for a variant in a lab, whose tokens stand for several. Times are the deployment's."""
    trace, is_ = generate_sessions(recipe), fit.deployment()
    requests = tuple(
        replace(one, output_tokens=lab_answer(one.output_tokens, answer_divisor)) for one in trace.requests
    )
    coarse = replace(is_, relay_itl_s=is_.relay_itl_s * answer_divisor, main_itl_s=is_.main_itl_s * answer_divisor)
    return simulate(replace(trace, requests=requests), VARIANTS[name], coarse, recipe.warm_up)


def lab_answer(tokens: int, divisor: int) -> int:
    """A deployment's answer in the lab, in tokens."""
    return max(1, round(tokens / divisor))


def runs(fit: Fit, names: Sequence[str], seeds: Sequence[int]) -> dict[str, list[Run]]:
    """The variants' runs by name, seed by seed."""
    found: dict[str, list[Run]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            found[name].append(predicted(fit, name, fit.recipe(seed, FIT_REQUESTS), ANSWER_DIVISOR))
    return found


def figures(fit: Fit, seeds: Sequence[int]) -> tuple[float, float, float, float]:
    """(PDD's P90, PDD's P99, CDC-PD's P90, the relay's share) as the lab would show them, means over seeds."""
    found = runs(fit, ("pdd", "cdc-pd"), seeds)
    pdd, cdc = found["pdd"], found["cdc-pd"]
    return (
        fmean(run.ttft_s(0.90) for run in pdd) + fit.lab_adds_s,
        fmean(run.ttft_s(0.99) for run in pdd) + fit.lab_adds_s,
        fmean(run.ttft_s(0.90) for run in cdc) + fit.lab_adds_s,
        fmean(run.relay_share for run in pdd),
    )


def solve(fit: Fit, seeds: Sequence[int], say: Callable[[str], None] = lambda _: None) -> Fit:
    """The four parameters that hit the four figures. Raises ExperimentError when they do not settle.

    Each round moves every parameter by what its own figure is off; what one does to the others' shrinks from round to
    round. P99 is about cap / speed, P90 about a prompt / speed: so the cap follows from their ratio.
    """
    for number in range(MOST_ROUNDS):
        p90, p99, cdc_p90, share = figures(fit, seeds)
        say(f"PDD {p90:.2f} / {p99:.2f} s, CDC-PD {cdc_p90:.2f} s, relay {share:.2%}")
        off: tuple[float, ...] = (
            p90 / TARGET_PDD_P90_S,
            p99 / TARGET_PDD_P99_S,
            (cdc_p90 - p90) / (TARGET_CDC_P90_S - TARGET_PDD_P90_S),
            share / TARGET_SHARE,
        )
        # the cap comes in whole blocks: P99 moves in steps of 0.8 %
        if max(abs(value - 1) for value in off) < CLOSE:
            return fit
        if number > 1:  # a little faster, and requests take other routes: whole steps would go to and fro
            off = tuple(value**0.5 for value in off)
        speed = fit.prefill_tokens_per_s * off[0]
        cap = fit.context_tokens * off[0] / off[1]
        fit = replace(
            fit,
            prefill_tokens_per_s=round(speed),
            context_tokens=round(cap / BLOCK) * BLOCK,
            connection_bytes_per_s=round(fit.connection_bytes_per_s * off[2] / 1e5) * 100_000,
            relay_itl_s=round(fit.relay_itl_s * off[3], 4),
        )
    raise ExperimentError(f"the parameters did not settle in {MOST_ROUNDS} rounds; the last were {as_json(fit)}")


def as_json(fit: Fit) -> dict[str, Any]:
    return asdict(fit)


def as_written(fit: Fit) -> dict[str, str]:
    """The fitted values as topologies/paper.yaml has them, by their paths."""
    return {
        "profiles.gpu-a.prefill": f"{fit.prefill_tokens_per_s:g} tokens/s",
        "profiles.gpu-a.decode": f"{fit.relay_itl_s * 1000:g}ms",
        "serving.kv_pool.rate": f"{fit.connection_bytes_per_s * 8 / 1e6:g}mbit",
    }


def refit_by_simulation(say: Callable[[str], None]) -> Iterator[str]:
    """`pddbed experiment fit ttft`: solve, write fit.json and topologies/paper.yaml, yield what changed, in words."""
    before = Fit.read()
    found = solve(before, FIT_SEEDS, say)
    how = (
        f"simulated (pddbed sim) on {len(FIT_SEEDS)} traces of {FIT_REQUESTS} requests that no run uses; means "
        "moved to the published figures: prefill_tokens_per_s to PDD's P90, context_tokens to PDD's P99, "
        "connection_bytes_per_s to CDC-PD's P90, relay_itl_s to the relay's share of tokens (each of which stands for "
        f"{ANSWER_DIVISOR} in the lab). Measured: lab_adds_s. Assumed: the others; "
        "rate_per_s is low because PDD's P99 is about what the longest prompt takes: hardly anybody queues"
    )
    found = replace(found, how=how)
    write_whole(FIT_FILE, json.dumps(as_json(found), indent=1) + "\n")
    edit_topology(TOPOLOGY, as_written(found))
    for name, value in as_json(found).items():
        yield f"{name:<24} {getattr(before, name)} -> {value}" if name != "how" else f"{name:<24} {value}"
