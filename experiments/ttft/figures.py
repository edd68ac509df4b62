"""The figures of `ttft`, `split` and `consistency`: published, measured, and what the simulator said. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from experiments.framework.base import Part, PartResult
from experiments.framework.checks import bytes_figure, late_steps_figure
from experiments.framework.figures import Figure, Label, percentile, within
from experiments.sim.outcome import SLA_P90_S, SLA_P99_S, Run
from experiments.ttft.fit import (
    TARGET_CDC_P90_S,
    TARGET_CDC_P99_S,
    TARGET_PDD_P90_S,
    TARGET_PDD_P99_S,
    TARGET_SHARE,
)

Results = Mapping[str, tuple[Part, PartResult]]
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One variant's records, one sequence a seed, in the order of arrival."""

    name: str
    by_seed: Sequence[Records]

    @property
    def all(self) -> list[Mapping[str, Any]]:
        return [record for records in self.by_seed for record in records]

    def column(self, key: str) -> list[float]:
        """Values of all seeds, where there are any."""
        return [float(record[key]) for record in self.all if record.get(key) is not None]

    def ttft_s(self, share: float) -> tuple[float, ...]:
        """A percentile, seed by seed."""
        return tuple(percentile([one["ttft_ms"] / 1000 for one in records], share) for records in self.by_seed)

    def relay_share(self) -> tuple[float, ...]:
        """Tokens that a relay made of all, seed by seed."""
        return tuple(
            sum(one["pdd_rld_tokens"] for one in records) / sum(one["output_len"] for one in records)
            for records in self.by_seed
        )

    def behind(self, begin: float = 0.0, end: float = 1.0) -> tuple[float, ...]:
        """Mean of prefill's hit rate less main decode's when the route was chosen, seed by seed.

        `begin`, `end`: only this stretch of the requests. Prompts only: generated tokens are not in it.
        """
        return tuple(
            fmean(lags) for records in self.by_seed if (lags := [lag(one) for one in _stretch(records, begin, end)])
        )

    def meets_sla(self) -> bool:
        """Verdict on all seeds' requests together."""
        ttft_s = [value / 1000 for value in self.column("ttft_ms")]
        return percentile(ttft_s, 0.90) < SLA_P90_S and percentile(ttft_s, 0.99) < SLA_P99_S


def lag(record: Mapping[str, Any]) -> float:
    return float(record["pdd_p_hit"]) - float(record["pdd_hit_rate"])


def _stretch(records: Records, begin: float, end: float) -> Records:
    return records[int(begin * len(records)) : max(1, int(end * len(records)))]


def rows_of(results: Results) -> dict[str, Row]:
    """Rows by variant, in the order of the parts."""
    found: dict[str, list[Records]] = {}
    for part, result in results.values():
        ordered = sorted(result.records, key=lambda record: int(record["index"]))
        if ordered:
            found.setdefault(part.detail["row"], []).append(ordered)
    return {name: Row(name, by_seed) for name, by_seed in found.items()}


Rows = Mapping[str, Row]
Predictions = Mapping[str, Sequence[Run]]  # by variant, seed by seed

# variant, share, published, label, which parameter was chosen
PUBLISHED: tuple[tuple[str, float, float, Label, str], ...] = (
    ("pdd", 0.90, TARGET_PDD_P90_S, "fitted", "prefill speed"),
    ("pdd", 0.99, TARGET_PDD_P99_S, "fitted", "context cap"),
    ("cdc-pd", 0.90, TARGET_CDC_P90_S, "fitted", "a connection's bandwidth"),
    ("cdc-pd", 0.99, TARGET_CDC_P99_S, "predicted", ""),
)
AGREE = 0.10  # simulator and lab
FALLEN_AWAY = 0.02  # of hit rate, in the mean: what `end_on_rld` costs at least, if it costs anything to speak of
MOST_BEHIND = 0.01


def ttft_figures(rows: Rows, runs: Predictions, judged: bool) -> list[Figure]:
    """Published ones first, then every variant's distribution beside what the simulator says of the same requests."""
    made = []
    for name, share, target, label, fitted in PUBLISHED:
        if name not in rows:
            continue
        row, text = rows[name], f"{title(name)} TTFT P{share * 100:.0f}"
        pooled = percentile(row.column("ttft_ms"), share) / 1000
        note = f"within 10%; of all {len(row.all)} requests together {pooled:.1f} s"
        key = f"p{share * 100:.0f}_ttft_{_plain(name)}"
        figure = within(key, text, "s", row.ttft_s(share), target, 0.10, label, fit=fitted, note=note)
        made.append(figure if judged else _unjudged(figure))
    made += _sla(rows, judged)
    for name, row in rows.items():
        made += _spread(name, row, runs.get(name, ()), judged)
    return made


def _sla(rows: Rows, judged: bool) -> list[Figure]:
    made = []
    for name, met in (("pdd", True), ("cdc-pd", False)):
        if name not in rows:
            continue
        text = f"{title(name)} {'meets' if met else 'misses'} P90 < {SLA_P90_S:.0f} s and P99 < {SLA_P99_S:.0f} s"
        value = (float(rows[name].meets_sla() == met),)
        note = "1: so it is, of all seeds' requests together"
        low, high = (1.0, 1.0) if judged else (None, None)
        made.append(Figure(f"sla_{_plain(name)}", text, "", value, "fitted", 1.0, low, high, "the P90s", note))
    return made


def _spread(name: str, row: Row, runs: Sequence[Run], judged: bool) -> list[Figure]:
    """A variant's percentiles, each against the simulator's on the same requests."""
    made = []
    for share in (0.50, 0.90, 0.99):
        target = fmean(run.ttft_s(share) for run in runs) if runs else None
        low, high = (None, None) if target is None or not judged else (target * (1 - AGREE), target * (1 + AGREE))
        made.append(
            Figure(
                f"sim_p{share * 100:.0f}_ttft_{_plain(name)}",
                f"{title(name)} TTFT P{share * 100:.0f}, lab against simulator",
                "s",
                row.ttft_s(share),
                "predicted",
                target,
                # the median is mostly this machine's own milliseconds, times the compression
                low if share > 0.5 else None,
                high if share > 0.5 else None,
                note="the simulator's on the same requests" + ("" if share > 0.5 else "; not judged"),
            )
        )
    for key, text, unit, scale in (("tpot_ms", "TPOT", "ms", 1.0), ("e2el_ms", "whole answer", "s", 0.001)):
        values = tuple(
            fmean(found) * scale
            for records in row.by_seed
            if (found := [float(one[key]) for one in records if one.get(key) is not None])
        )
        made.append(Figure(f"mean_{key}_{_plain(name)}", f"{title(name)} {text}, mean", unit, values, "predicted"))
    return made


def split_figures(rows: Rows, runs: Predictions, judged: bool) -> list[Figure]:
    if "pdd" not in rows:
        return []
    share = rows["pdd"].relay_share()
    low, high = (TARGET_SHARE - 0.01, TARGET_SHARE + 0.01) if judged else (None, None)
    note = "within 1 point"
    if runs.get("pdd"):
        note += f"; the simulator, with tokens as coarse as the lab's: {fmean(r.relay_share for r in runs['pdd']):.1%}"
    text = "tokens made by the relay, of all"
    made = [
        Figure("rld_share", text, "share", share, "fitted", TARGET_SHARE, low, high, "the relay's decode step", note)
    ]
    ratios = tuple((1 - value) / value for value in share if value)
    note = "follows from the share"
    made.append(Figure("md_over_rld", "main decode's tokens over the relay's", "x", ratios, "fitted", 15.2, note=note))
    relayed = _by_seed(rows["pdd"], lambda one: float(one["pdd_pipeline"] == "p-rld-md"))
    text = "requests that go over the relay"
    made.append(Figure("relay_pipeline", text, "share", relayed, "configured", None, note="follows from the trace"))
    return made


def consistency_figures(rows: Rows, judged: bool) -> list[Figure]:
    """Distance of main decode's hit rate from prefill's."""
    made = []
    if "pdd" in rows:
        low, high = (-MOST_BEHIND, MOST_BEHIND) if judged else (None, None)
        text = "MD's hit rate behind P's, with hand-over"
        behind = rows["pdd"].behind()
        made.append(
            Figure("behind_handover", text, "share", behind, "predicted", 0.0, low, high, note="within 1 point")
        )
        hits = _by_seed(rows["pdd"], lambda one: float(one["pdd_hit_rate"]))
        made.append(Figure("md_hit", "MD's hit rate, mean, with hand-over", "share", hits, "predicted"))
    if "pdd-end-on-rld" in rows:
        row = rows["pdd-end-on-rld"]
        low, high = (FALLEN_AWAY, 1.0) if judged else (None, None)
        text = "MD's hit rate behind P's, answers ending on the relay dropped"
        note = f"at least {FALLEN_AWAY:.0%}, in the second half of each run"
        made.append(
            Figure("behind_end_on_rld", text, "share", row.behind(0.5), "predicted", None, low, high, note=note)
        )
        hits = _by_seed(row, lambda one: float(one["pdd_hit_rate"]))
        made.append(Figure("md_hit_end_on_rld", "MD's hit rate, mean, dropped", "share", hits, "predicted"))
    return made


def checks(results: Results, judged: bool) -> list[Figure]:
    made = [bytes_figure(results), late_steps_figure(results, judged)]
    busy = tuple(result.facts["cpu_share"]["busy"] for _, result in results.values())
    note = f"while requests ran, mean of all parts; at most {max(busy):.0%}" if busy else ""
    mean = (fmean(busy),) if busy else ()
    made.append(Figure("cpu_busy", "this machine's CPUs, busy", "share", mean, "check", note=note))
    return made


def title(name: str) -> str:
    """As people write it."""
    words = {"pdd": "PDD", "cdc-pd": "CDC-PD", "idc-pd": "IDC-PD", "pdd-end-on-rld": "PDD, ending on RLD"}
    if name.endswith("-chunked"):
        return f"{words[name.removesuffix('-chunked')]}, chunked"
    return words[name]


def _by_seed(row: Row, value: Callable[[Mapping[str, Any]], float]) -> tuple[float, ...]:
    return tuple(fmean(value(one) for one in records) for records in row.by_seed)


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _unjudged(figure: Figure) -> Figure:
    return replace(figure, low=None, high=None, note="a short run: not judged")
