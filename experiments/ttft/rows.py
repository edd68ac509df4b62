"""Records of `ttft`'s parts as columns: variant by variant, seed by seed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.framework.experiment import Part, PartResult
from experiments.framework.figures import percentile
from experiments.sim.outcome import SLA_P90_S, SLA_P99_S

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
        """Of all seeds, where there is a value."""
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
        """Of all seeds' requests together."""
        ttft_s = [value / 1000 for value in self.column("ttft_ms")]
        return percentile(ttft_s, 0.90) < SLA_P90_S and percentile(ttft_s, 0.99) < SLA_P99_S


def lag(record: Mapping[str, Any]) -> float:
    return float(record["pdd_p_hit"]) - float(record["pdd_hit_rate"])


def _stretch(records: Records, begin: float, end: float) -> Records:
    return records[int(begin * len(records)) : max(1, int(end * len(records)))]


def rows_of(results: Results) -> dict[str, Row]:
    """By variant, in the order of the parts."""
    found: dict[str, list[Records]] = {}
    for part, result in results.values():
        ordered = sorted(result.records, key=lambda record: int(record["index"]))
        if ordered:
            found.setdefault(part.detail["row"], []).append(ordered)
    return {name: Row(name, by_seed) for name, by_seed in found.items()}
