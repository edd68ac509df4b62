"""`pddbed experiment run modes`: a lab for each mode of hand-over, the same prompts at several loads."""

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.framework.base import Evaluation, Experiment, Options, Part, PartResult, Progress, Session
from experiments.framework.checks import PaceSince, bytes_figure, check_bytes, late_steps_figure
from experiments.framework.figures import Figure, percentile
from experiments.framework.lab import ExperimentLab
from experiments.framework.requests import Client
from experiments.report.charts import Chart, Series
from testbed.topology.overlay import Overlay

TOPOLOGY = Path(__file__).resolve().parents[2] / "topologies" / "modes.yaml"
MODES = ("catch-up", "one-shot", "auto")
LOADS = (1, 4, 8)  # clients at once, each with its next prompt when it has its answer
PROMPT_TOKENS = 256
ANSWER_TOKENS, QUICK_ANSWER_TOKENS = 120, 64  # so long that answers outlive the KV's way, the WAN shared by eight
TOLERATED = 1.10  # auto over the better of the two
LEAST_HANDED_OVER = 0.5  # of the answers: what ends on the relay tells nothing of a mode
Results = Mapping[str, tuple[Part, PartResult]]

# what a client or an operator would have small: field of a record, words, and whether auto is judged by it
FIGURES = (
    ("e2el_ms", "whole answer", True),
    ("pdd_handoff_pause_ms", "pause at the hand-over", False),
    ("pdd_rld_hold_ms", "relay held", False),
)


def _answer_tokens(options: Options) -> int:
    return QUICK_ANSWER_TOKENS if options.quick else ANSWER_TOKENS


def _count(options: Options, load: int) -> int:
    return max(3, load) if options.quick else 6 + 3 * load


class Modes(Experiment):
    name = "modes"
    title = "modes: catch-up, one-shot and auto across relay load"
    claim = "Which mode of hand-over serves better depends on the relay's load; auto is within 10 % of the better one."
    with_workers = True

    def topology(self, options: Options) -> Path:
        return TOPOLOGY

    def variation(self, variant: str) -> Overlay:
        return {"serving.handoff": variant}

    def parameters(self, options: Options) -> dict[str, Any]:
        return {
            "modes": MODES,
            "loads": LOADS,
            "requests": {str(load): _count(options, load) for load in LOADS},
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": _answer_tokens(options),
            "seeds": options.seeds,
            "quick": options.quick,
        }

    def parts(self, options: Options) -> list[Part]:
        """Seed by seed, so that each mode has a lab for each seed and a machine that changes favours none."""
        made = []
        for seed in range(1, options.seeds + 1):
            for mode in MODES:
                for load in LOADS:
                    count = _count(options, load)
                    tokens = _answer_tokens(options)
                    seconds = 2 + count / load * tokens * (0.016 + 0.002 * load)
                    detail = {"row": f"{mode}, {load} at once", "mode": mode, "load": load, "count": count}
                    made.append(Part(f"{mode}-load{load}-seed{seed}", seed, seconds, detail, variant=mode))
        return made

    def session(self, lab: ExperimentLab, options: Options) -> AbstractContextManager[Session]:
        return _open(lab, _answer_tokens(options))

    def evaluate(self, parameters: Mapping[str, Any], results: Results) -> Evaluation:
        figures = [figure for load in LOADS for figure in _compared(results, load, judged=not parameters["quick"])]
        figures += [bytes_figure(results), late_steps_figure(results, judged=not parameters["quick"])]
        summary = {
            f"{kind}_{key}_{part.name}": value
            for part, result in results.values()
            for key, _, _ in FIGURES
            for kind, value in _spread(_values(result, key)).items()
        }
        return Evaluation(figures, _charts(results), _notes(parameters, results), summary)


class _ModesSession:
    def __init__(self, lab: ExperimentLab, client: Client, answer_tokens: int) -> None:
        self._answer_tokens = answer_tokens
        self._lab = lab
        self._client = client

    def run(self, part: Part, directory: Path, progress: Progress) -> PartResult:
        capture = directory / "wan0.pcapng"
        count = part.detail["count"]
        source = random.Random(f"modes {part.seed} {part.detail['load']}")  # the same prompts for every mode
        prompts = [source.choices(range(32, 127), k=PROMPT_TOKENS) for _ in range(count)]
        pace = PaceSince(self._lab.record.results)
        with self._lab.capturing("wan0", capture):
            found = self._client.complete_all(
                prompts, self._answer_tokens, part.detail["load"], lambda done: progress(done / count)
            )
        check = check_bytes(capture, self._lab.record.results)
        reasons = check.reasons
        failed = sum(not record["success"] for record in found)
        if failed:
            reasons.append(f"{failed} of {count} requests failed")
        about = {"part": part.name, "row": part.detail["row"], "seed": part.seed}
        records = [{**record, **about, "e2el_ms": record["e2el"] * 1000} for record in found]
        return PartResult(records, {**check.facts(), "pace": pace.facts()}, reasons)


@contextmanager
def _open(lab: ExperimentLab, answer_tokens: int) -> Iterator[_ModesSession]:
    client = Client(lab.state["api"], str(lab.plan.model["name"]), lab.record.results / "requests.jsonl")
    try:
        client.complete_all([[40 + index] * 64 for index in range(8)], 48, 4, lambda done: None)  # first steps are slow
        yield _ModesSession(lab, client, answer_tokens)
    finally:
        client.close()


def _values(result: PartResult, key: str) -> list[float]:
    """Values of the requests that have it: no pause without a hand-over, no relay held where none was asked."""
    return [float(record[key]) for record in result.records if record.get(key) is not None]


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": fmean(values), "p50": percentile(values, 0.5), "p90": percentile(values, 0.9)} if values else {}


def _means(results: Results, mode: str, load: int, key: str) -> tuple[float, ...]:
    """Seed by seed."""
    found = [_values(r, key) for p, r in results.values() if (p.detail["mode"], p.detail["load"]) == (mode, load)]
    return tuple(fmean(values) for values in found if values)


def _handed_over(results: Results, mode: str, load: int) -> float:
    """The share of answers of which main decode made a part."""
    of_mode = [r for p, r in results.values() if (p.detail["mode"], p.detail["load"]) == (mode, load)]
    records = [record for result in of_mode for record in result.records]
    return sum(record["pdd_md_tokens"] > 0 for record in records) / len(records) if records else 0.0


def _compared(results: Results, load: int, judged: bool) -> list[Figure]:
    """Auto is judged by what a client waits for in all; not in a short run, which tells more of the machine."""
    handed = tuple(_handed_over(results, mode, load) for mode in MODES)
    text = f"answers that were handed over, {load} at once, of the mode with the fewest"
    low, high = (LEAST_HANDED_OVER, 1.0) if judged else (None, None)
    figures = [Figure(f"handed_over_load{load}", text, "share", (min(handed),), "check", None, low, high)]
    for key, words, decides in FIGURES:
        by_mode = {mode: _means(results, mode, load, key) for mode in MODES}
        figures += [
            Figure(f"{key}_{mode}_load{load}", f"{words}, {load} at once: {mode}, mean", "ms", values, "predicted")
            for mode, values in by_mode.items()
        ]
        if decides and all(by_mode.values()):
            better = [min(pair) for pair in zip(by_mode["catch-up"], by_mode["one-shot"], strict=False)]
            ratio = tuple(auto / best for auto, best in zip(by_mode["auto"], better, strict=False))
            text = f"{words}, {load} at once: auto over the better of the two"
            low, high = (0.0, TOLERATED) if judged else (None, None)
            figures.append(Figure(f"auto_load{load}", text, "x", ratio, "predicted", None, low, high))
    return figures


def _charts(results: Results) -> list[Chart]:
    charts = []
    for key, words, _ in FIGURES:
        series = []
        for mode in MODES:
            points = [(float(load), fmean(means)) for load in LOADS if (means := _means(results, mode, load, key))]
            series.append(Series(mode, points))
        charts.append(Chart(f"{words[0].upper()}{words[1:]}, by load", "clients at once", "ms, mean", series))
    return charts


def _notes(parameters: Mapping[str, Any], results: Results) -> list[str]:
    chosen: dict[str, int] = {}
    for part, result in results.values():
        for record in result.records if part.detail["mode"] == "auto" else ():
            mode = record.get("pdd_handoff_mode") or "no hand-over"
            words = f"{mode} at {part.detail['load']} at once"
            chosen[words] = chosen.get(words, 0) + 1
    told = ", ".join(f"{words}: {count}" for words, count in sorted(chosen.items()))
    return [
        f"Real workers, prompts of {parameters['prompt_tokens']} tokens that no cache has seen, answers of "
        f"{parameters['answer_tokens']}; the same prompts for every mode. What ended on the relay has no pause.",
        f"What auto chose: {told}." if told else "",
    ]
