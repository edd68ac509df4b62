"""`pddbed experiment run cost`: how many requests a cluster serves under the SLA, and what E may then cost.

The publication says neither how many nodes it had nor what they cost, so its figures are not judged: reported is where
they could lie.

Two clusters serve requests under one SLA: a homogeneous one of N nodes of kind A, a share of them decoding, and PDD's.
This one serves GOODPUT times as many requests with as many times the prefill nodes; decode work grows as well, the
relay's share of it on nodes of kind A, the rest on kind E, which decodes 2.1 times as fast. Costs are in nodes A.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.cost.runs import Load, sla_rps
from experiments.framework.base import Computation, Evaluation, Options, Part, PartResult, Progress
from experiments.framework.figures import Figure
from experiments.report.charts import Chart, Mark, Series
from experiments.sim.outcome import SLA_P90_S, SLA_P99_S
from experiments.ttft.fit import TOPOLOGY, Fit, as_json

GOODPUT = 1.278
COST_LOW, COST_HIGH = 1 - 0.071, 1 - 0.035  # over the homogeneous cluster's
BCR = 1.375
RELAY_SHARE = 0.062
CHIP_E_DECODE = 2.10


@dataclass(frozen=True, slots=True)
class Cluster:
    """PDD's cluster in the place of `nodes` of kind A, `decode_share` of which decode; `price` is that of a node E."""

    nodes: int
    decode_share: float
    prefill: int
    relays: int
    chips: int

    def price(self, cost: float) -> float:
        """Price of a node E, in nodes A, for which the whole costs `cost` times the other cluster."""
        return (cost * self.nodes - self.prefill - self.relays) / self.chips

    def cost(self, price: float) -> float:
        """Over the homogeneous cluster's."""
        return (self.prefill + self.relays + price * self.chips) / self.nodes


def cluster(nodes: int, decode_share: float, relays: int, prefill_for: Callable[[int], int] | None = None) -> Cluster:
    """At least `relays` relays: one alone would be a single point of failure.

    `prefill_for`: prefill nodes of PDD that serve GOODPUT times what so many of the homogeneous cluster do; left out:
    in proportion.
    """
    decode = max(1, round(nodes * decode_share))
    prefill = max(1, nodes - decode)
    more = prefill_for(prefill) if prefill_for is not None else math.ceil(prefill * GOODPUT - 1e-9)
    work = decode * GOODPUT
    return Cluster(
        nodes,
        decode_share,
        more,
        max(relays, math.ceil(work * RELAY_SHARE - 1e-9)),
        math.ceil(work * (1 - RELAY_SHARE) / CHIP_E_DECODE - 1e-9),
    )


def feasible(of: Cluster, cost: float) -> bool:
    """True if a node of kind E could have that price: above nothing and no dearer than one of kind A."""
    return 0 < of.price(cost) <= 1


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
        made = [price_chart(COST_LOW), price_chart(COST_HIGH), edge_chart(results)]
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
    """Price that a node of kind E has to have for the published cost, by cluster."""
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


CHART_NODES = range(8, 200, 4)
CHART_SHARES = (0.4, 0.45, 0.5, 0.55, 0.6)
CHART_PRICES = (-0.5, 1.5)


def price_chart(cost: float) -> Chart:
    """Price of E over cluster size, a line a decode share. What is below 0 or far above 1 is left out."""
    series = []
    for share in CHART_SHARES:
        points = [(float(nodes), cluster(nodes, share, LEAST_RELAYS).price(cost)) for nodes in CHART_NODES]
        series.append(
            Series(f"{share:.0%} decode", [at for at in points if CHART_PRICES[0] <= at[1] <= CHART_PRICES[1]])
        )
    marks = [Mark(1.0, "E as dear as A", horizontal=True), Mark(0.0, "E for nothing", horizontal=True)]
    return Chart(
        f"What E may cost for the cluster to cost {1 - cost:.1%} less",
        "nodes of the homogeneous cluster",
        "price of a node E, in nodes A",
        series,
        marks,
        caption="Between the marks the published cost and goodput are possible together. With a quarter of the nodes "
        "decoding they are not, whatever E costs; with three quarters they would be exceeded.",
    )


def edge_chart(results: Mapping[str, tuple[Part, PartResult]]) -> Chart:
    """P90 over rate, of the first seed and most nodes there are."""
    chosen = [result for part, result in results.values() if part.seed == 1]
    nodes = max((int(result.facts["nodes"]) for result in chosen), default=0)
    rows = [row for result in chosen if result.facts["nodes"] == nodes for row in result.records]
    series = []
    for policy in ("pdd", "idc-pd", "cdc-pd"):
        points = sorted(
            (row["rate_per_s"], row["p90_s"])
            for row in rows
            if row["policy"] == policy and row["prefill_speed"] == 1 and row["p90_s"] < 3 * SLA_P90_S
        )
        series.append(Series(policy, points))
    return Chart(
        f"The SLA's edge, {nodes} prefill nodes",
        "requests a second",
        "s to the first token, P90",
        series,
        [Mark(SLA_P90_S, f"SLA: {SLA_P90_S:.0f} s", horizontal=True)],
        caption="Simulated at the rates that the bisection tried. P90 is close to the SLA at any rate, so the highest "
        "rate that meets it moves a lot with little.",
    )
