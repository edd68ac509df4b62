"""`pddbed experiment run chip-bias`: chip E's speeds against GPU A's, measured on running workers."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.chip_bias.runs import AT_ONCE, CHIPS, open_session, parts
from experiments.framework.base import Evaluation, Experiment, Options, Part, PartResult, Session
from experiments.framework.checks import bytes_figure, late_steps_figure
from experiments.framework.figures import Figure, within
from experiments.framework.lab import ExperimentLab
from experiments.report.charts import Chart, Series
from testbed.topology import load_plan
from testbed.topology.load import plan_from_text
from testbed.topology.overlay import Overlay, laid_over

TOPOLOGY = Path(__file__).resolve().parents[2] / "topologies" / "chip-bias.yaml"
PREFILL_SHARE, DECODE_SPEED = 0.81, 2.10
TOLERATED = 0.02
Results = Mapping[str, tuple[Part, PartResult]]


class ChipBias(Experiment):
    name = "chip-bias"
    title = "chip-bias: chip E's prefill and decode against GPU A's"
    claim = "Chip E has 81 % of the GPU's speed in prefill and 210 % in decode."
    with_workers = True

    def topology(self, options: Options) -> Path:
        return TOPOLOGY

    def variation(self, variant: str) -> Overlay:
        return {f"datacenters.{host}.profile": variant for host in ("main.hosts.p0", "remote.hosts.md0")}

    def parameters(self, options: Options) -> dict[str, Any]:
        plan = load_plan(TOPOLOGY)
        assert plan.scale is not None
        scale = plan.scale.scale
        return {
            "chips": {chip: _speeds(laid_over(TOPOLOGY, self.variation(chip))) for chip in CHIPS},
            "prompt_divisor": scale.prompt_scale,
            "output_divisor": scale.output_scale,
            "time_compression": scale.time_compression,
            "seeds": options.seeds,
            "quick": options.quick,
        }

    def parts(self, options: Options) -> list[Part]:
        return parts(options)

    def session(self, lab: ExperimentLab, options: Options) -> AbstractContextManager[Session]:
        return open_session(lab)

    def evaluate(self, parameters: Mapping[str, Any], results: Results) -> Evaluation:
        prefill = {chip: _prefill_per_s(results, chip) for chip in CHIPS}
        figures = [_against("prefill", "prefill", prefill["chip-e"], prefill["gpu-a"], PREFILL_SHARE)]
        steps = {(chip, at_once): _step_ms(results, chip, at_once) for chip in CHIPS for at_once in AT_ONCE}
        for at_once in AT_ONCE:
            words = "decode" if at_once == 1 else f"decode, {at_once} answers at once"
            speed = _against(f"decode{at_once}", words, steps["gpu-a", at_once], steps["chip-e", at_once], DECODE_SPEED)
            figures.append(speed)
        for chip in CHIPS:
            asked = parameters["chips"][chip]
            text = f"{chip}: prompt tokens a second"
            figures.append(_asked(f"prefill_{chip}", text, "tokens/s", prefill[chip], asked["prefill_per_s"]))
            figures.append(
                _asked(f"step_{chip}", f"{chip}: decode step", "ms", steps[chip, 1], asked["decode_step_ms"])
            )
        figures += [bytes_figure(results), late_steps_figure(results, judged=not parameters["quick"])]
        return Evaluation(figures, _charts(results), _notes(parameters))


def _speeds(topology: str) -> dict[str, float]:
    """A chip's, as the topology gives them, in the deployment's units."""
    plan = plan_from_text(topology, TOPOLOGY)
    assert plan.scale is not None
    scale, pace = plan.scale.scale, dict(next(host for host in plan.hosts if host.pace).pace)
    return {
        "prefill_per_s": 1e9 / (pace["prefill_token_ns"] * scale.time_compression) * scale.prompt_scale,
        "decode_step_ms": pace["decode_step_ns"] * scale.time_compression / scale.output_scale / 1e6,
    }


def _of(results: Results, chip: str, kind: str, at_once: int | None = None) -> list[PartResult]:
    return [
        result
        for part, result in results.values()
        if (part.detail["chip"], part.detail["kind"], part.detail.get("at_once")) == (chip, kind, at_once)
    ]


def _prefill_per_s(results: Results, chip: str) -> tuple[float, ...]:
    """Seed by seed: all prompts' tokens over all their time."""
    found = _of(results, chip, "prefill")
    return tuple(sum(r["prefill_tokens"] for r in x.records) / sum(r["prefill_s"] for r in x.records) for x in found)


def _step_ms(results: Results, chip: str, at_once: int) -> tuple[float, ...]:
    found = _of(results, chip, "decode", at_once)
    return tuple(fmean(float(record["decode_step_ms"]) for record in result.records) for result in found)


def _against(key: str, text: str, above: tuple[float, ...], below: tuple[float, ...], target: float) -> Figure:
    ratios = tuple(a / b for a, b in zip(above, below, strict=False))
    return within(f"{key}_ratio", f"chip E over GPU A: {text}", "x", ratios, target, TOLERATED, "configured")


def _asked(key: str, text: str, unit: str, values: tuple[float, ...], target: float) -> Figure:
    return within(key, text, unit, values, target, TOLERATED, "configured")


def _charts(results: Results) -> list[Chart]:
    prefill, decode = [], []
    for chip in CHIPS:
        records = [record for result in _of(results, chip, "prefill") for record in result.records]
        prefill.append(Series(chip, sorted((float(r["prefill_tokens"]), float(r["prefill_s"])) for r in records)))
        for result in _of(results, chip, "decode", 1)[:1]:
            gaps = enumerate(result.records[0]["itl"], 1)
            decode.append(Series(chip, [(float(number), gap_s * 1e3) for number, gap_s in gaps]))
    return [
        Chart("Prefill of a prompt", "tokens computed", "s", prefill, caption="Every prompt of every seed."),
        Chart("Between two tokens of an answer", "token", "ms, in the lab", decode, caption="First seed, alone."),
    ]


def _notes(parameters: Mapping[str, Any]) -> list[str]:
    return [
        "Both chips are profiles that the workers are paced to, so what is measured follows from what was configured. "
        "It shows that pacing holds, not what a chip can do. The real computation runs in each step.",
        f"In the deployment's units: a prompt token here stands for {parameters['prompt_divisor']}, an answer token "
        f"for {parameters['output_divisor']}, and times are divided by {parameters['time_compression']:g}.",
        "Prefill is timed by the prefill worker, one prompt at a time; decode by the gateway, from the second token "
        "on.",
    ]
