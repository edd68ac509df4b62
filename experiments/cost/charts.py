"""The pictures of `cost`: the price of E that the published cost implies, and the SLA's edge. Pure."""

from collections.abc import Mapping

from experiments.cost.model import cluster
from experiments.framework.experiment import Part, PartResult
from experiments.report.charts import Chart, Mark, Series
from experiments.sim.outcome import SLA_P90_S

SIZES = range(8, 200, 4)
SHARES = (0.4, 0.45, 0.5, 0.55, 0.6)
LEAST_RELAYS = 3
SHOWN = (-0.5, 1.5)


def price_chart(cost: float) -> Chart:
    """Price of E over cluster size, a line a decode share. What is below 0 or far above 1 is left out."""
    series = []
    for share in SHARES:
        points = [(float(nodes), cluster(nodes, share, LEAST_RELAYS).price(cost)) for nodes in SIZES]
        series.append(Series(f"{share:.0%} decode", [point for point in points if SHOWN[0] <= point[1] <= SHOWN[1]]))
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
