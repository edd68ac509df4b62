"""`pddbed experiment run handoff`: KV of 100 tokens streamed, or the 100 ids sent and recomputed."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from experiments.framework.base import Evaluation, Experiment, Options, Part, PartResult, Session
from experiments.framework.checks import bytes_figure
from experiments.framework.figures import Figure, percentile, within
from experiments.framework.lab import ExperimentLab
from experiments.handoff import fit as published
from experiments.handoff.fit import TOKENS, Fit
from experiments.handoff.runs import SMOLLM2, open_session, parts
from experiments.report.charts import Chart, Mark, Series, cdf
from workers.models.fetch import FETCHABLE, model_path

TOPOLOGY = Path(__file__).resolve().parents[2] / "topologies" / "handoff.yaml"
Results = Mapping[str, tuple[Part, PartResult]]
KV_STD_GROWS, RECOMPUTE_STD_GROWS = 5.0, 1.2
LEAST_TRANSFERS = 100  # for a mean and a deviation that tell the congestion and not the draw
LEAST_RECOMPUTED = 40  # for a deviation that one late packet does not decide
_NO_GROWTH_MS = 0.5  # added to calm deviations: two that are hardly there do not differ by their ratio


def has_smollm2() -> bool:
    """True if SmolLM2 has been fetched (`pddbed model get`)."""
    return model_path(FETCHABLE[SMOLLM2]).exists()


class Handoff(Experiment):
    name = "handoff"
    title = "handoff: recompute 100 tokens, or stream their KV"
    claim = (
        "Recomputing 100 tokens takes 305.2 ms (at most 321.4, deviation 4.8) whatever the network does; streaming "
        "their KV over Ethernet takes 185.4 ms (at most 512.6, deviation 96.3), and 24.5 ms of host copies."
    )
    with_workers = False

    def topology(self, options: Options) -> Path:
        return TOPOLOGY

    def parameters(self, options: Options) -> dict[str, Any]:
        fit = Fit.read()
        return {
            "fit": asdict(fit),
            "tokens": TOKENS,
            "link_bps": published.LINK_BPS,
            "smollm2": has_smollm2() and not options.quick,
            "seeds": options.seeds,
            "quick": options.quick,
            "pace": {"mean_ms": published.RECOMPUTE_MEAN_MS, "std_ms": published.RECOMPUTE_STD_MS},
        }

    def parts(self, options: Options) -> list[Part]:
        return parts(options, has_smollm2())

    def session(self, lab: ExperimentLab, options: Options) -> AbstractContextManager[Session]:
        return open_session(lab, Fit.read())

    def evaluate(self, parameters: Mapping[str, Any], results: Results) -> Evaluation:
        names = dict.fromkeys(part.detail["row"] for part, _ in results.values())
        rows = {row: _column(results, row) for row in names}
        whole = {row: _column(results, row, whole=True) for row in names}
        figures = [*_kv(rows), *_recompute(rows), *_verdicts(rows, whole), *_others(results)]
        summary = {
            f"{kind}_{row}": value
            for row, by_seed in rows.items()
            for kind, value in _spread([value for values in by_seed for value in values]).items()
        }
        return Evaluation(figures, _charts(results), _notes(parameters), summary)


def _time_of(record: Mapping[str, Any], whole: bool = False) -> float:
    """KV streamed, or tokens recomputed, in ms. `whole`: with the way of the ids, which is where congestion can act."""
    if "pdd_kv_xfer_ms" in record:
        return float(record["pdd_kv_xfer_ms"])
    return float(record["pdd_handoff_ms" if whole else "pdd_extend_ms"])


def _column(results: Results, row: str, whole: bool = False) -> list[list[float]]:
    """The times of a row, seed by seed."""
    parts_of = [result for part, result in results.values() if part.detail["row"] == row]
    return [[_time_of(record, whole) for record in result.records] for result in parts_of]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(values), "max": max(values), "std": pstdev(values), "p50": percentile(values, 0.5)}


def _kv(rows: Mapping[str, list[list[float]]]) -> list[Figure]:
    found = [_spread(values) for values in rows.get("kv, congested", [])]
    enough = all(len(values) >= LEAST_TRANSFERS for values in rows.get("kv, congested", []))
    figures = []
    for key, text, target, by in (
        ("mean", "mean", published.MEAN_MS, "length of bursts and pauses"),
        ("max", "peak", published.PEAK_MS, "the low rate"),
        ("std", "standard deviation", published.STD_MS, "length of bursts and pauses"),
    ):
        words, values = f"KV streaming, congested: {text}", [f[key] for f in found]
        if enough:
            figures.append(within(f"kv_{key}", words, "ms", values, target, 0.15, "fitted", fit=by))
        else:
            note = "a short run sees too few bursts to be judged"
            figures.append(Figure(f"kv_{key}", words, "ms", tuple(values), "fitted", target, fit=by, note=note))
    return figures


def _recompute(rows: Mapping[str, list[list[float]]]) -> list[Figure]:
    found = [_spread(values) for values in rows.get("recompute, congested", [])]
    note = "paced to the published profile; the real computation runs first"
    return [
        Figure(
            f"recompute_{key}",
            f"recompute, congested: {text}",
            "ms",
            tuple(f[key] for f in found),
            "configured",
            target,
            target * 0.9 if judged else None,
            target * 1.1 if judged else None,
            note=note,
        )
        for key, text, target, judged in (
            ("mean", "mean", published.RECOMPUTE_MEAN_MS, True),
            ("max", "peak", published.RECOMPUTE_MAX_MS, False),
            ("std", "standard deviation", published.RECOMPUTE_STD_MS, False),
        )
    ]


def _growth(rows: Mapping[str, list[list[float]]], kind: str) -> tuple[float, ...]:
    """The deviation under congestion over the calm one, seed by seed."""
    pairs = zip(rows.get(f"{kind}, calm", []), rows.get(f"{kind}, congested", []), strict=False)
    return tuple(pstdev(congested) / max(_NO_GROWTH_MS, pstdev(calm)) for calm, congested in pairs)


def _verdicts(rows: Mapping[str, list[list[float]]], whole: Mapping[str, list[list[float]]]) -> list[Figure]:
    """Verdicts on whole hand-overs: recomputing alone knows no network, and could not but be steady."""
    text = "deviation, congested over calm"
    kv, recompute = _growth(whole, "kv"), _growth(whole, "recompute")
    by = "length of bursts and pauses"
    ids = "the ids' way and recomputing, whose own deviation is configured; what congestion adds is not"
    most: tuple[float | None, float | None] = (0.0, RECOMPUTE_STD_GROWS)
    if any(len(values) < LEAST_RECOMPUTED for values in whole.get("recompute, congested", [])):
        most, ids = (None, None), f"{ids}; in a short run one late packet decides, so nothing is judged"
    words = f"{text}: ids and recompute"
    figures = [
        Figure("kv_growth", f"{text}: KV streaming", "x", kv, "fitted", None, KV_STD_GROWS, float("inf"), fit=by),
        Figure("recompute_growth", words, "x", recompute, "configured", None, *most, note=ids),
    ]
    note = "as fast as this machine computes; its deviation is the machine's"
    for where in ("calm", "congested"):
        if of_seeds := rows.get(f"smollm2, {where}"):
            words = f"recompute with SmolLM2, unpaced, {where}: mean"
            means = tuple(fmean(values) for values in of_seeds)
            figures.append(Figure(f"smollm2_mean_{where}", words, "ms", means, "check", note=note))
    if growth := _growth(whole, "smollm2"):
        figures.append(Figure("smollm2_growth", f"{text}: SmolLM2, unpaced", "x", growth, "predicted", note=note))
    return figures


def _others(results: Results) -> list[Figure]:
    figures = []
    for row, words in (
        ("kv, calm", "behind a KV transfer, calm"),
        ("kv, congested", "behind a KV transfer, congested"),
        ("recompute, congested", "with nothing ahead, congested"),
    ):
        parts_of = [result for part, result in results.values() if part.detail["row"] == row]
        values = tuple(fmean(float(r["pdd_token_ids_ms"]) for r in result.records) for result in parts_of)
        key = f"token_ids_{row.replace(', ', '_')}"
        figures.append(Figure(key, f"100 token ids, {words}: mean", "ms", values, "check"))
    found = [result.facts["host_copies"] for _, result in results.values()][:1]
    copies = tuple(one["median_ms"] for one in found)
    device = next((one["device"] for one in found), "nothing")
    note = f"of 100 tokens' KV to the host and back, on {device}; the published ones are another machine's"
    figures.append(Figure("host_copies", "host copies", "ms", copies, "check", published.HOST_COPIES_MS, note=note))
    figures.append(bytes_figure(results))
    return figures


def _charts(results: Results) -> list[Chart]:
    first = {part.detail["row"]: result for part, result in reversed(list(results.values()))}
    over_time = [
        Series(row, [(float(r["arrival_s"]), _time_of(r, whole=True)) for r in first[row].records])
        for row in ("kv, congested", "recompute, congested", "kv, calm", "recompute, calm")
        if row in first
    ]
    rows = {row: [_time_of(r, whole=True) for r in result.records] for row, result in first.items()}
    return [
        Chart(
            "A hand-over of 100 tokens, one after the other",
            "s",
            "ms",
            over_time,
            [Mark(published.PEAK_MS, "published peak of KV streaming", True)],
            caption="The same congestion for both: KV streaming follows the network, recomputing does not. First seed.",
        ),
        Chart("Time of a hand-over", "ms", "% of hand-overs", [cdf(row, values) for row, values in rows.items()]),
    ]


def _notes(parameters: Mapping[str, Any]) -> list[str]:
    fit = Fit(**parameters["fit"])
    return [
        f"KV of {TOKENS} tokens is {TOKENS * fit.bytes_per_token:,} bytes of memory, streamed by the workers' "
        "transport over one connection. Recomputing is the workers' engine extending by the 100 ids that came over the "
        "control connection; the built-in model computes for real, then waits until the published profile's time.",
        f"The named congestion: 100 Mbit/s are free, and {fit.low_bps / 1e6:.1f} Mbit/s in bursts of "
        f"{fit.burst_ms:.0f} ms with pauses of {fit.pause_ms:.0f} ms, both exponentially distributed. Fit: {fit.how}.",
        "The hand-over's ids share the bottleneck with KV: sent behind a transfer they wait for it, as the table says.",
    ]
