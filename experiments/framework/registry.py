"""The experiments by name, imported when they are named."""

from collections.abc import Callable, Iterator
from importlib import import_module

from experiments.framework.base import Experiment, ExperimentError, Reported

# name -> (module:class, the claim in a line)
EXPERIMENTS = {
    "chip-bias": (
        "experiments.chip_bias.experiment:ChipBias",
        "chip E has 81 % of the GPU's prefill and 210 % of its decode",
    ),
    "skew": ("experiments.skew.experiment:Skew", "P50 KV transfer 248 ms with skewed hit rates, 1210 ms with uniform"),
    "delta": ("experiments.delta.experiment:Delta", "a decode-side cache cuts WAN bytes tenfold at 90 % hit rate"),
    "modes": ("experiments.modes.experiment:Modes", "auto is within 10 % of the better of catch-up and one-shot"),
    "handoff": (
        "experiments.handoff.experiment:Handoff",
        "recomputing 100 tokens is steady, streaming their KV is not",
    ),
    "ttft": ("experiments.ttft.experiment:Ttft", "TTFT P90 9.8 s and P99 14.4 s with PDD, 18.3 and 30 s with CDC-PD"),
    "split": ("experiments.ttft.experiment:Split", "the relay makes 6.2 % of all tokens"),
    "consistency": ("experiments.ttft.experiment:Consistency", "hand-over keeps MD's hit rate equal to P's"),
    "cost": (
        "experiments.cost.experiment:Cost",
        "which clusters the published cost and goodput can belong to; simulated",
    ),
}


# name -> what finds its free parameters anew, writes them and yields what changed, in words
REFITS = {
    "skew": "experiments.skew.runs:refit_live",
    "handoff": "experiments.handoff.fit:refit_by_arithmetic",
    "ttft": "experiments.ttft.fit:refit_by_simulation",
}
Refit = Callable[[Callable[[str], None]], Iterator[str]]


def refit(name: str) -> Refit:
    """The re-fit of an experiment that has one."""
    module, attribute = REFITS[name].split(":")
    found: Refit = getattr(import_module(module), attribute)
    return found


def find(name: str) -> Experiment:
    """Raises ExperimentError."""
    if name not in EXPERIMENTS:
        raise ExperimentError(f'no experiment "{name}"; there are: {", ".join(EXPERIMENTS)}')
    module, attribute = EXPERIMENTS[name][0].split(":")
    made: Experiment = getattr(import_module(module), attribute)()
    return made


def find_reported(name: str) -> Reported:
    """Experiment, or `pddbed bench`, whose records a run's directory holds. Raises ExperimentError."""
    if name == "bench":
        return import_module("experiments.bench.report").Bench()  # type: ignore[no-any-return]
    return find(name)
