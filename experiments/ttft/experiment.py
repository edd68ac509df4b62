"""`pddbed experiment run ttft|split|consistency`: one trace, policy by policy, in paced labs of topologies/paper.yaml.

`ttft` runs every variant; the other two only what they need, or take it over from a run of `ttft` (`--from`). Each
report has all that its variants tell.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.framework.base import Evaluation, Experiment, Options, Part, Session
from experiments.framework.figures import percentile
from experiments.framework.lab import ExperimentLab
from experiments.report.charts import Chart
from experiments.sim.outcome import Run
from experiments.ttft import charts, figures
from experiments.ttft.figures import Predictions, Results, Row, rows_of
from experiments.ttft.fit import BLOCK, TOPOLOGY, Fit, as_json, predicted
from experiments.ttft.load import BESIDE, FULL, JUDGED, QUICK, Shape
from experiments.ttft.runs import open_session, parts, variation
from testbed.topology.overlay import Overlay

_QUICK = "-quick"
FAMILY = ("ttft", "split", "consistency")


class Ttft(Experiment):
    name = "ttft"
    title = "ttft: time to the first token, policy by policy"
    claim = (
        "CDC-PD's time to the first token is 18.3 s at P90 and about 30 s at P99; PDD's 9.8 s (-46 %) and 14.4 s, "
        "within an SLA of 10 s and 15 s."
    )
    with_workers = True
    variants: tuple[str, ...] = (*JUDGED, *BESIDE)
    quick_variants: tuple[str, ...] = ("pdd", "cdc-pd")

    def __init__(self, full: Shape = FULL) -> None:
        self._full = full

    def _shape(self, options: Options) -> Shape:
        return QUICK if options.quick else self._full

    def topology(self, options: Options) -> Path:
        return TOPOLOGY

    def variation(self, variant: str) -> Overlay:
        shape = QUICK if variant.endswith(_QUICK) else self._full
        return variation(variant.removesuffix(_QUICK), Fit.read(), shape)

    def parameters(self, options: Options) -> dict[str, Any]:
        return {
            "fit": as_json(Fit.read()),
            "shape": asdict(self._shape(options)),
            "block_tokens": BLOCK,
            "variants": self._names(options),
            "seeds": options.seeds,
            "quick": options.quick,
        }

    def shares(self, name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
        """`ttft`, `split` and `consistency` differ in their variants only."""
        return name in FAMILY and {**theirs, "variants": ()} == {**ours, "variants": ()}

    def _names(self, options: Options) -> tuple[str, ...]:
        return self.quick_variants if options.quick else self.variants

    def parts(self, options: Options) -> list[Part]:
        suffix = _QUICK if options.quick else ""
        return parts(Fit.read(), self._shape(options), self._names(options), options.seeds, suffix)

    def session(self, lab: ExperimentLab, options: Options) -> AbstractContextManager[Session]:
        return open_session(lab, Fit.read(), self._shape(options))

    def evaluate(self, parameters: Mapping[str, Any], results: Results) -> Evaluation:
        rows = rows_of(results)
        runs = _predictions(parameters, results)
        judged = not parameters["quick"]
        found = [
            *figures.ttft_figures(rows, runs, judged),
            *figures.split_figures(rows, runs, judged),
            *figures.consistency_figures(rows, judged),
            *figures.checks(results, judged),
        ]
        return Evaluation(found, _charts(rows, runs), _notes(parameters, judged), _summary(rows))


class Split(Ttft):
    name = "split"
    title = "split: who makes the tokens"
    claim = "The relay makes 6.2 % of all tokens, main decode 93.8 %: 15.2 times as many."
    variants = ("pdd",)
    quick_variants = ("pdd",)


class Consistency(Ttft):
    name = "consistency"
    title = "consistency: main decode's cache follows prefill's"
    claim = (
        "Handing over keeps main decode's hit rate equal to prefill's; ending requests on the relay starts a vicious "
        "circle of misses."
    )
    variants = ("pdd", "pdd-end-on-rld")
    quick_variants = ("pdd", "pdd-end-on-rld")


def _charts(rows: Mapping[str, Row], runs: Predictions) -> list[Chart]:
    made = [charts.ttft_chart(rows), charts.tail_chart(rows, runs), charts.hits_chart(rows)]
    return [*made, charts.split_chart(rows["pdd"])] if "pdd" in rows else made


def _predictions(parameters: Mapping[str, Any], results: Results) -> dict[str, list[Run]]:
    fit, shape = Fit(**parameters["fit"]), Shape(**parameters["shape"])
    found: dict[str, list[Run]] = {}
    for part, _ in results.values():
        name = part.detail["row"]
        recipe = fit.recipe(part.seed, part.detail["requests"], shape.sessions)
        found.setdefault(name, []).append(predicted(fit, name, recipe, shape.output_divisor))
    return found


def _summary(rows: Mapping[str, Row]) -> dict[str, float]:
    """Flat names for summary.json, in vllm's manner; times are the deployment's."""
    found: dict[str, float] = {}
    for name, row in rows.items():
        plain = name.replace("-", "_")
        found[f"completed_{plain}"] = len(row.all)
        for key in ("ttft_ms", "tpot_ms", "e2el_ms", "kv_xfer_ms", "kv_queue_ms"):
            values = row.column(key)
            if values:
                found[f"mean_{key}_{plain}"] = sum(values) / len(values)
                found[f"median_{key}_{plain}"] = percentile(values, 0.5)
                found |= {f"p{share}_{key}_{plain}": percentile(values, share / 100) for share in (90, 99)}
    return found


def _notes(parameters: Mapping[str, Any], judged: bool) -> list[str]:
    fit, shape = parameters["fit"], parameters["shape"]
    notes = [
        f"Real workers, paced to the deployment's times: prompts 1:{shape['prompt_divisor']}, answers "
        f"1:{shape['output_divisor']}, times 1:{shape['time_compression']:g}. Times here are the deployment's, so "
        "each millisecond of this machine's own counts as many times.",
        f"The same requests for every policy, in the same moments: {fit['rate_per_s']:g} a second of the deployment, "
        "generated like a coding agent's sessions, caches filled before. Nobody waits for an earlier answer.",
        "chunked: KV leaves while prefill computes; not the publication's way, and the stronger baseline.",
        f"Fit: {fit['how']}.",
    ]
    return notes if judged else ["A short run: it shows that everything works, and judges nothing.", *notes]
