"""report.html: a run as one self-contained page."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from experiments.framework.base import Evaluation
from experiments.framework.figures import Figure
from experiments.framework.links import changes_of, settings_of
from experiments.report.charts import Chart, Series
from experiments.report.charts import figure as drawn_figure
from experiments.report.compare import Change, Compared, change, differences, keys, left_out, overlaid


def page(run: Mapping[str, Any], summary: Mapping[str, Any], evaluation: Evaluation, links: Path) -> str:
    """The page's text. `links` is links.jsonl, which may be missing."""
    charts = [*evaluation.charts, *_link_charts(links)]
    finished = run["finished"]
    return rendered(
        "page.html",
        run=run,
        summary=summary,
        figures=[_cells(row) for row in evaluation.figures],
        notes=evaluation.notes,
        charts=charts,
        command=command(run),
        started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run["started"])),
        minutes=f"{(finished - run['started']) / 60:.1f}" if finished else "",
        memory=f"{run['machine']['memory_bytes'] / 2**30:.0f} GiB",
        load=" ".join(f"{value:.1f}" for value in run["machine"]["load"]),
        links=_link_rows(run),
        settings=settings_of(run["labs"]),
        changes=changes_of(run["labs"]),
        parameters=json.dumps(run["parameters"], indent=2),
    )


def comparison(runs: Sequence[Compared], legend: str) -> str:
    """The page of `pddbed compare`."""
    first = runs[0]
    diffs = [
        line
        for run in runs[1:]
        for line in unified_diff(
            str(first.about["topology"]).splitlines(),
            str(run.about["topology"]).splitlines(),
            f"{first.name}: topology",
            f"{run.name}: topology",
            lineterm="",
        )
    ]
    return rendered(
        "compare.html",
        experiment=first.about["experiment"],
        runs=runs,
        rows=compared_rows(runs),
        legend=legend,
        differences=differences(runs),
        topology="\n".join(diffs),
        charts=overlaid(runs),
        left_out=left_out(runs),
        notes=[f"{run.name}: {note}" for run in runs for note in run.evaluation.notes],
    )


def compared_rows(runs: Sequence[Compared]) -> list[list[str]]:
    """A row a figure: its words, the first run's value, and each further one's with how it differs."""
    rows = []
    for key in keys(runs):
        found = [run.figure(key) for run in runs]
        first = found[0]
        row = [next(one.text for one in found if one is not None)]
        for number, one in enumerate(found):
            row.append("-" if one is None else shown(one.value, one.unit))
            if number:
                row.append("-" if first is None or one is None else _changed(change(first, one)))
        rows.append(row)
    return rows


def _changed(found: Change | None) -> str:
    if found is None or found.relative is None:
        return "-"
    text = f"{found.relative:+.1%}" if abs(found.relative) < 10 else f"{1 + found.relative:.3g} x"
    return f"{text} (overlap)" if found.apart is False and found.relative else text


def rendered(template: str, *, charts: Sequence[Chart], **values: Any) -> str:
    """A template of this folder, with its style and charts."""
    folder = Path(__file__).parent
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    drawn = [Markup(drawn_figure(chart)) for chart in charts]  # every text in it is escaped
    style = Markup((folder / "style.css").read_text())
    return environment.from_string((folder / template).read_text()).render(charts=drawn, style=style, **values)


def command(run: Mapping[str, Any]) -> str:
    """Command that makes this run again."""
    if "command" in run:
        return str(run["command"])
    return f"pddbed experiment run {run['experiment']}" + (" --quick" if run["quick"] else f" --seeds {run['seeds']}")


def shown(value: float | None, unit: str) -> str:
    """A figure's value with its unit, as tables have it."""
    if value is None:
        return "-"
    if unit == "share":
        return f"{value:.2%}" if abs(value) < 0.05 else f"{value:.1%}"
    counted = unit in ("", "B") and float(value).is_integer()
    digits = 0 if counted or abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}" + (f" {unit}" if unit else "")


def _cells(figure: Figure) -> dict[str, str]:
    interval = figure.interval
    target = shown(figure.target, figure.unit)
    if figure.target is None and figure.low is not None and figure.high is not None:
        target = f"{shown(figure.low, figure.unit)} to {shown(figure.high, figure.unit)}"
    return {
        "text": figure.text,
        "target": target,
        "measured": shown(figure.value, figure.unit),
        "interval": "-" if interval is None else " to ".join(shown(end, figure.unit) for end in interval),
        "verdict": figure.verdict,
        "label": figure.label,
        "fit": figure.fit,
        "note": figure.note,
    }


def _link_rows(run: Mapping[str, Any]) -> list[list[str]]:
    """Each verified figure of each link, before and after."""
    from testbed.verify.words import shown as as_measured

    rows = []
    for number, lab in enumerate(run["labs"], 1):
        found: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
        for when in ("verified_before", "verified_after"):
            for link in (lab[when] or {"links": []})["links"]:
                for direction, figures in link["directions"].items():
                    for figure in figures:
                        mark = "" if figure["ok"] else " (out of tolerance)"
                        text = as_measured(figure["measured"], figure["unit"]) + mark
                        found[link["name"], direction, figure["figure"]][when] = text
        rows += [
            [str(number), *key, both.get("verified_before", "-"), both.get("verified_after", "-")]
            for key, both in found.items()
        ]
    return rows


def _link_charts(links: Path) -> list[Chart]:
    """Load that each link carried, second by second, all parts in a row."""
    if not links.exists():
        return []
    rows = [json.loads(line) for line in links.read_text().splitlines()]
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        span_s = row.get("span_s", 1.0)
        name = f"{row['link']} {row['direction']}"
        series[name].append((seconds[name], row["bytes"] * 8 / 1e6 / span_s))
        seconds[name] += span_s
    drawn = [Series(name, points, "step") for name, points in series.items()]
    return [Chart("What the links carried", "seconds of the run, its parts in a row", "Mbit/s (IP bytes)", drawn)]
