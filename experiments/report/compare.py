"""Runs of one experiment side by side: what was asked differently, each figure of each run, plots laid over each other.
Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.framework.base import Evaluation
from experiments.framework.figures import Figure
from experiments.framework.links import changes_of, settings_of
from experiments.report.charts import Chart


@dataclass(frozen=True, slots=True)
class Compared:
    """A run: what it is called here, its run.json, and what its records come to."""

    name: str
    about: Mapping[str, Any]
    evaluation: Evaluation

    def figure(self, key: str) -> Figure | None:
        """Figure of that name, if the run has it."""
        return next((figure for figure in self.evaluation.figures if figure.key == key), None)


@dataclass(frozen=True, slots=True)
class Change:
    """From the first run's figure to another's. `relative`: of the first (0.1: a tenth more), None where that is 0.

    `apart`: their 95 % intervals over seeds do not overlap; None where one of them has no interval.
    """

    relative: float | None
    apart: bool | None


def change(first: Figure, other: Figure) -> Change | None:
    """None where one of them has no value."""
    before, after = first.value, other.value
    if before is None or after is None:
        return None
    relative = after / before - 1 if before else (0.0 if after == before else None)
    if first.interval is None or other.interval is None:
        return Change(relative, None)
    return Change(relative, first.interval[1] < other.interval[0] or other.interval[1] < first.interval[0])


def keys(runs: Sequence[Compared]) -> list[str]:
    """Keys of all runs' figures, each once, in their order."""
    return list(dict.fromkeys(figure.key for run in runs for figure in run.evaluation.figures))


def common(runs: Sequence[Compared]) -> list[str]:
    """Those that all runs have, but for checks: experiments that are made of the same parts share some."""
    found = {key: [run.figure(key) for run in runs] for key in keys(runs)}
    return [key for key, ones in found.items() if all(one is not None and one.label != "check" for one in ones)]


def differences(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """Parameters and machine facts that are not the same in all runs, and each run's."""
    told = [dict(_flat(_facts(run.about))) for run in runs]
    names = dict.fromkeys(name for one in told for name in one)
    rows = [(name, [one.get(name, "-") for one in told]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _facts(about: Mapping[str, Any]) -> dict[str, Any]:
    labs = about.get("labs", [])
    machine = {key: about.get("machine", {}).get(key, "-") for key in ("cpu", "cpus", "kernel")}
    drivers = ", ".join(sorted({lab["driver"] for lab in labs}))
    links = {f"link {name}": words for name, words in settings_of(labs).items()}
    return {
        **about["parameters"],
        "seeds": about["seeds"],
        **links,
        "links changed meanwhile": changes_of(labs) or "-",
        "WAN driver": drivers,
        **machine,
    }


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)[:12] if name.endswith("sha256") else str(value)


def left_out(runs: Sequence[Compared]) -> list[str]:
    """Titles of charts that not every run has, so that they are not laid over each other."""
    titles = [{chart.title for chart in run.evaluation.charts} for run in runs]
    every = set.intersection(*titles)
    return [title for title in dict.fromkeys(t for ones in titles for t in sorted(ones)) if title not in every]


def overlaid(runs: Sequence[Compared]) -> list[Chart]:
    """Every chart that is in all runs, once, with each run's series in it."""
    by_title = [{chart.title: chart for chart in run.evaluation.charts} for run in runs]
    made = []
    for title, first in by_title[0].items():
        if not all(title in charts for charts in by_title):
            continue
        series = [
            replace(one, name=f"{run.name}: {one.name}")
            for run, charts in zip(runs, by_title, strict=True)
            for one in charts[title].series
        ]
        made.append(replace(first, series=series))
    return made
