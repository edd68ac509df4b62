"""`pddbed experiment run cost`: how many requests a cluster serves under the SLA, and what E may then cost.

The publication says neither how many nodes it had nor what they cost, so its figures are not judged: reported is where
they could lie.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.cost import charts
from experiments.cost.capacity import Load, sla_rps
from experiments.cost.model import BCR, COST_HIGH, COST_LOW, GOODPUT, RELAY_SHARE, cluster, feasible
from experiments.framework.experiment import Computation, Evaluation, Options, Part, PartResult, Progress
from experiments.framework.figures import Figure
from experiments.sim.outcome import SLA_P90_S, SLA_P99_S
from experiments.ttft.fit import TOPOLOGY, Fit, as_json

POLICIES = ("pdd", "idc-pd", "cdc-pd")
NODES, QUICK_NODES = (3, 6, 12), (3,)
REQUESTS, QUICK_REQUESTS = 1500, 500
SPEEDS = (0.95, 1.05)  # of prefill: what the SLA's edge is worth
CLUSTERS = (12, 24, 48, 96)
SHARES = (0.25, 0.5, 0.75)
LEAST_RELAYS = 3
Results = Mapping[str, tuple[Part, PartResult]]


class Cost(Computation):
    name = "cost"
    title = "cost: what a cluster with cheap decode nodes may cost"
    claim = (
        "Under an SLA of P90 < 10 s and P99 < 15 s PDD costs 3.5 to 7.1 % less, serves 27.8 % more requests and has a "
        "benefit-cost ratio 37.5 % higher than a homogeneous cluster."
    )

    def topology(self, options: Options) -> Path:
        return TOPOLOGY

    def parameters(self, options: Options) -> dict[str, Any]:
        return {
            "fit": as_json(Fit.read()),
            "sla_s": (SLA_P90_S, SLA_P99_S),
            "nodes": QUICK_NODES if options.quick else NODES,
            "requests": QUICK_REQUESTS if options.quick else REQUESTS,
            "least_relays": LEAST_RELAYS,
            "seeds": options.seeds,
            "quick": options.quick,
        }

    def parts(self, options: Options) -> list[Part]:
        made = []
        for nodes in QUICK_NODES if options.quick else NODES:
            for seed in range(1, options.seeds + 1):
                requests = QUICK_REQUESTS if options.quick else REQUESTS
                detail = {"nodes": nodes, "requests": requests}
                seconds = requests * (1 + nodes / 6) * 0.006
                made.append(Part(f"nodes{nodes}-seed{seed}", seed, seconds, detail))
        return made

    def compute(self, part: Part, progress: Progress) -> PartResult:
        """Rows are simulated rates; facts have `sla_rps` by policy and prefill speed."""
        fit, nodes = Fit.read(), part.detail["nodes"]
        recipe = fit.recipe(part.seed, part.detail["requests"], max(16, fit.sessions * nodes // fit.prefill_nodes))
        load, of = Load.make(recipe, (part.seed,)), replace(fit.deployment(), prefill_nodes=nodes)
        found: dict[str, float] = {}
        rows: list[dict[str, Any]] = []
        asked = [(policy, 1.0) for policy in POLICIES]
        asked += [(policy, speed) for policy in ("pdd", "idc-pd") for speed in SPEEDS]
        for index, (policy, speed) in enumerate(asked):
            faster = replace(of, prefill_tokens_per_s=of.prefill_tokens_per_s * speed)
            rate, tried = sla_rps(load, policy, faster)
            found[f"{policy} x{speed:g}"] = rate
            about = {"part": part.name, "seed": part.seed, "prefill_speed": speed}
            rows += [{"request_id": f"{part.name}-{len(rows) + i}", **row, **about} for i, row in enumerate(tried)]
            progress((index + 1) / len(asked))
        return PartResult(rows, {"nodes": nodes, "sla_rps": found})

    def evaluate(self, parameters: Mapping[str, Any], results: Results) -> Evaluation:
        rates = _rates(results)
        figures = [*_capacity(parameters, rates), *_prices(), *_published()]
        summary = {f"sla_rps_{key}_{nodes}_nodes": value for (nodes, key), value in rates.items()}
        made = [charts.price_chart(COST_LOW), charts.price_chart(COST_HIGH), charts.edge_chart(results)]
        return Evaluation(figures, made, _notes(parameters), summary)


def _rates(results: Results) -> dict[tuple[int, str], tuple[float, ...]]:
    """`sla_rps` by prefill nodes and policy x speed, seed by seed."""
    found: dict[tuple[int, str], tuple[float, ...]] = {}
    for _, result in results.values():
        for key, value in result.facts["sla_rps"].items():
            at = (int(result.facts["nodes"]), key)
            found[at] = (*found.get(at, ()), value)
    return found


def _capacity(parameters: Mapping[str, Any], rates: Mapping[tuple[int, str], tuple[float, ...]]) -> list[Figure]:
    made = []
    for nodes in parameters["nodes"]:
        for policy in POLICIES:
            values = rates.get((nodes, f"{policy} x1"), ())
            text = f"sla_rps with {nodes} prefill nodes, {policy}"
            made.append(Figure(f"sla_rps_{policy}_{nodes}", text, "req/s", values, "predicted"))
        ratios = tuple(
            pdd / idc
            for pdd, idc in zip(rates.get((nodes, "pdd x1"), ()), rates.get((nodes, "idc-pd x1"), ()), strict=False)
            if idc
        )
        text = f"sla_rps of PDD over IDC-PD, {nodes} prefill nodes each"
        note = "1 where both queue alike: more goodput then takes more prefill nodes"
        made.append(Figure(f"ratio_{nodes}", text, "x", ratios, "predicted", note=note))
        for speed in SPEEDS:
            now, base = rates.get((nodes, f"pdd x{speed:g}"), ()), rates.get((nodes, "pdd x1"), ())
            change = tuple(one / before - 1 for one, before in zip(now, base, strict=False) if before)
            text = f"sla_rps of PDD with {nodes} prefill nodes, prefill {speed - 1:+.0%}"
            note = "the SLA lies on a cliff: P90 is within 2 % of it"
            made.append(Figure(f"edge_{nodes}_{speed:g}", text, "share", change, "predicted", note=note))
    return made


def _prices() -> list[Figure]:
    """What a node of kind E has to cost for the published cost, by cluster."""
    made = []
    for share in SHARES:
        for nodes in CLUSTERS:
            of = cluster(nodes, share, LEAST_RELAYS)
            for cost in (COST_LOW, COST_HIGH):
                price = of.price(cost)
                words = "possible" if feasible(of, cost) else "impossible" if price <= 0 else "E dearer than A"
                text = f"price of E over A: {nodes} nodes, {share:.0%} decoding, cost {cost - 1:+.1%}"
                note = f"{words}: {of.prefill} prefill, {of.relays} relay, {of.chips} E"
                key = f"price_{nodes}_{share * 100:.0f}_{cost * 1000:.0f}"
                made.append(Figure(key, text, "x", (price,), "predicted", note=note))
    return made


def _published() -> list[Figure]:
    bcr = (GOODPUT / COST_LOW, GOODPUT / COST_HIGH)
    note = "goodput 1.278 over cost 0.929: the published 37.5 % belong to the cheap end"
    return [
        Figure("bcr_low_cost", "benefit-cost ratio at cost -7.1 %", "x", bcr[:1], "configured", BCR, note=note),
        Figure("bcr_high_cost", "benefit-cost ratio at cost -3.5 %", "x", bcr[1:], "configured", BCR),
    ]


def _notes(parameters: Mapping[str, Any]) -> list[str]:
    return [
        "Simulated and calculated, nothing measured; no verdicts, since node counts and prices are not published.",
        f"sla_rps: the highest rate at which P90 < {SLA_P90_S:.0f} s and P99 < {SLA_P99_S:.0f} s, by bisection over "
        f"simulated runs of {parameters['requests']} requests. CDC-PD meets the SLA at no rate.",
        f"A cluster of N nodes A, some of which decode, against PDD with {GOODPUT - 1:.1%} more goodput: as many times "
        f"the prefill nodes, relays for {RELAY_SHARE:.1%} of the decode work but at least "
        f"{parameters['least_relays']}, and nodes E for the rest at 2.1 times the speed. Prices above 1: the saving "
        "would be larger than published even if E cost as much as A; below 0: no price is low enough.",
    ]
